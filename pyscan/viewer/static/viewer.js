// The viewer's source of data: the server that sent this page. It is asked again and again for new steps.
"use strict";

pyscan.Server = class {
  colours = ["log", "z"];
  blocks = true;

  async ask(path, query = {}) {
    const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== undefined && value !== null));
    const answer = await fetch(`${path}${text.size ? `?${text}` : ""}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  state = () => this.ask("api/state");
  runs = () => this.ask("api/runs");
  frame = ({ at, measure, colour, scope }) => this.ask("api/frame", { at, measure, colour, scope });
  history = (query) => this.ask("api/history", query);
  timeline = (query) => this.ask("api/timeline", query);
  tokens = (query) => this.ask("api/tokens", query);
  at = async (step) => (await this.ask("api/at", { step: Math.round(step) })).at;
};

pyscan.follow = async (page) => {
  const sign = pyscan.by("live");
  const tell = (className, text) => {
    sign.hidden = false;
    sign.className = className;
    sign.lastElementChild.textContent = text;
  };
  let [quiet, drawn] = [0, page.info.num_steps];
  page.lost = (error) => tell("lost", error.message);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (document.hidden) continue;
    let now;
    try {
      now = await page.source.state();
    } catch {
      tell("lost", "the viewer has ended");
      continue;
    }
    const grown = now.num_steps !== page.info.num_steps;
    quiet = grown ? 0 : quiet + 1;
    const isLive = grown || (quiet < 15 && sign.className === "on");
    tell(isLive ? "on" : "", `${isLive ? "live, " : ""}${pyscan.thousands(now.num_steps)} steps`);
    await pyscan.take(page, now, grown);
    if (page.info.num_steps !== drawn && (page.info.num_steps < 500 || page.info.num_steps > 1.01 * drawn || quiet > 1)) {
      drawn = page.info.num_steps;
      await page.drawTime();
      if (page.picked.length) await page.drawHistory();
    }
  }
};

// Take in a new state; who looks at the last step goes on looking at the last.
pyscan.take = async (page, now, grown) => {
  const atEnd = page.view.at >= page.info.num_steps - 1;
  if (now.changes !== page.info.changes) await page.load();
  Object.assign(page.info, now);
  if (!grown) return;
  page.resize();
  if (atEnd && !page.playing) await page.go(now.num_steps - 1);
};

(async () => {
  const page = new pyscan.Page(new pyscan.Server());
  pyscan.page = page;
  await page.start();
  await pyscan.follow(page);
})();
