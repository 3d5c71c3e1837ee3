"""The order of everything on the streams: whatever the training does next to its tensors, the numbers are right."""

import numpy as np
import pytest
import torch

from pyscan import address_tables, groups, results
from tests.streams.rig import Rig

BIG = 1 << 40


def test_inputs_are_read_after_they_were_made() -> None:
    with Rig().training() as rig:
        for site in range(3):
            rig.see(site, rig.make())
        rig.buffer.flush()
        rig.end_step()


def test_memory_is_not_given_away_while_it_is_read() -> None:
    with Rig(lag=BIG).training() as rig:
        for _ in range(3):
            for site in range(3):
                x = rig.make()
                rig.see(site, x)
                del x
                rig.buffer.flush()
            rig.end_step()


def test_memory_of_the_last_group_is_given_back_at_the_join() -> None:
    with Rig(lag=BIG).training() as rig:
        x = rig.make()
        rig.see(0, x)
        rig.buffer.flush()
        rig.buffer.join()
        x.zero_()
        del x
        rig.make()
        rig.end_step()


def test_a_pinned_table_is_not_filled_while_it_is_copied() -> None:
    with Rig(lag=BIG).training() as rig:
        for _ in range(4):
            for site in range(3):
                rig.see(site, rig.make())
                rig.buffer.flush()
            rig.end_step()


def test_the_host_waits_for_the_oldest_table_when_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_tables, "MAX_TABLES", 3)
    with Rig(lag=BIG).training() as rig:
        for _ in range(8):
            rig.see(0, rig.make())
            rig.buffer.flush()
        rig.end_step()
    assert rig.device.num_waits > 1


def test_gradients_may_be_clipped_once_the_backward_is_joined() -> None:
    with Rig().training() as rig:
        for _ in range(2):
            grads = [rig.make(70) for _ in range(3)]
            for site, grad in enumerate(grads):
                rig.watch(site, grad)
                rig.buffer.flush_grads()
            rig.buffer.join()
            for grad in grads:
                grad.mul_(0.1)
            rig.end_step()


def test_gradients_are_free_again_after_the_row_even_without_a_join() -> None:
    with Rig().training() as rig:
        grad = rig.make(70)
        rig.watch(1, grad)
        rig.end_step()
        grad.zero_()
        rig.watch(1, grad)
        rig.end_step()


def test_a_gradient_read_on_the_current_stream_may_change_at_once() -> None:
    with Rig().training() as rig:
        grad = rig.make(70)
        rig.set(0, grad)
        grad.mul_(0.1)
        rig.end_step()


def test_a_gradient_that_changed_while_it_was_read_is_read_again() -> None:
    rig = Rig()
    with rig.device.recording():
        grad = rig.make(70)
        rig.buffer.watch_grad(rig.buffer.grad_slots(0), grad)
        rig.buffer.flush_grads()
        grad.mul_(0.5)
        rig.buffer.join()
        rig.set(0, grad)
        rig.end_step()
        rig.take(rig.buffer.wait_arrivals())
    np.testing.assert_array_equal(rig.rows[0], rig.sent[0])
    # The write itself ran beside the read, which nobody can prevent; the sums were written in order all the same.
    assert all("sums" not in text for text in rig.device.violations)


def test_a_gradient_that_changed_and_is_gone_is_absent() -> None:
    rig = Rig()
    with rig.device.recording():
        grad = rig.make(70)
        rig.buffer.watch_grad(rig.buffer.grad_slots(0), grad)
        grad.mul_(0.5)
        rig.end_step()
        rig.take(rig.buffer.wait_arrivals())
    assert (rig.cells(0, "grad", 0) < 0).all()
    assert (rig.cells(0, "grad_max", 0) < 0).all()


def test_an_input_that_autograd_does_not_keep_is_read_at_once() -> None:
    with Rig(frozen=(1,)).training() as rig:
        for _ in range(2):
            x = rig.make()
            rig.see(1, x)
            x.relu_()
            y = rig.make()
            rig.see(0, y)
            rig.end_step()


def test_an_input_changed_before_it_was_read_is_absent_then_read_at_once() -> None:
    rig = Rig()
    with rig.device.recording():
        for _ in range(2):
            x = rig.make()
            rig.see(0, x)
            x.add_(1)
            rig.see(1, rig.make())
            rig.buffer.flush()
            rig.end_step()
        rig.take(rig.buffer.wait_arrivals())
    assert rig.device.violations == []
    assert rig.buffer.changed == [0]
    for channel in ("act", "act_max", "act_bad"):
        assert (rig.cells(0, channel, 0) < 0).all()
        np.testing.assert_array_equal(rig.cells(0, channel, 1), rig.sent[0][rig.buffer.cells(channel, 1)])
    np.testing.assert_array_equal(rig.rows[1], rig.sent[1])


def test_an_input_changed_while_it_was_read_is_absent() -> None:
    rig = Rig()
    with rig.device.recording():
        x = rig.make()
        rig.see(0, x)
        rig.buffer.flush()
        x.add_(1)
        rig.end_step()
        rig.take(rig.buffer.wait_arrivals())
    assert (rig.cells(0, "act", 0) < 0).all()


def test_one_tensor_that_meets_several_weights_is_read_once() -> None:
    with Rig().training() as rig:
        x = rig.make()
        for site in range(3):
            rig.see(site, x)
        rig.buffer.flush()
        assert rig.buffer.num_launches == 2
        rig.end_step()


def test_a_tensor_changed_in_place_between_two_weights_is_not_the_same() -> None:
    rig = Rig()
    with rig.device.recording():
        x = rig.make()
        rig.see(0, x)
        x.add_(1)
        rig.see(1, x)
        rig.end_step()
        rig.take(rig.buffer.wait_arrivals())
    assert (rig.cells(0, "act", 0) < 0).all()
    np.testing.assert_array_equal(rig.cells(0, "act", 1), rig.sent[0][rig.buffer.cells("act", 1)])


def test_a_weight_met_twice_gets_the_rows_of_both() -> None:
    with Rig().training() as rig:
        x = rig.make()
        rig.see(0, x)
        rig.see(0, x)
        rig.see(0, rig.make())
        rig.end_step()


def test_sums_are_forgotten_before_the_next_step_adds_to_them() -> None:
    with Rig(frozen=(0,)).training() as rig:
        for _ in range(3):
            rig.see(0, rig.make())
            rig.see(1, rig.make())
            rig.end_step()


def test_a_row_waits_for_gradients_read_on_the_current_stream() -> None:
    with Rig().training() as rig:
        for _ in range(2):
            rig.set(2, rig.make(70))
            rig.end_step()


def test_one_slot_may_be_filled_on_both_streams() -> None:
    with Rig().training() as rig:
        for _ in range(2):
            rig.see(0, rig.make())
            rig.buffer.flush()
            rig.see(0, rig.make(), at_once=True)
            rig.see(0, rig.make())
            rig.end_step()


def test_tensors_of_another_stream_are_waited_for_on_that_stream() -> None:
    with Rig().training() as rig:
        other = rig.device.new_stream()
        for _ in range(2):
            with rig.device.on(other):
                rig.see(0, rig.make())
            rig.see(1, rig.make())
            rig.end_step()


def test_launches_on_different_current_streams_are_ordered() -> None:
    with Rig(frozen=(0, 1)).training() as rig:
        other = rig.device.new_stream()
        for _ in range(2):
            rig.see(0, rig.make())
            with rig.device.on(other):
                rig.see(1, rig.make())
                rig.see(0, rig.make())
            rig.end_step()


def test_rows_arrive_late_and_whole() -> None:
    with Rig(lag=20).training() as rig:
        for step in range(8):
            rig.see(0, rig.make())
            rig.end_step()
            assert len(rig.rows) <= step
        assert len(rig.rows) >= 4
        assert rig.device.num_waits == 0


def test_a_place_is_not_used_again_before_its_row_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "NUM_PLACES", 2)
    with Rig(lag=BIG).training() as rig:
        for _ in range(7):
            rig.see(0, rig.make())
            rig.end_step()


def test_numbers_come_with_the_row_as_they_were_when_it_was_sent() -> None:
    with Rig().training() as rig:
        loss, scale = torch.tensor(2.5), torch.tensor([4.0])
        for _ in range(3):
            rig.set(0, rig.make(70))
            rig.end_step(loss, scale, scale=scale)
            loss.add_(1)
            scale.mul_(2)
    assert rig.numbers == [[2.5, 4.0], [3.5, 8.0], [4.5, 16.0]]


def test_while_a_graph_is_captured_only_the_current_stream_is_used() -> None:
    with Rig().training() as rig:
        rig.see(2, rig.make())  # noted before the capture, sent after it
        rig.device.capturing = True
        kept = [rig.make() for _ in range(2)]
        for site, x in enumerate(kept):
            rig.see(site, x)
        rig.buffer.flush()
        rig.buffer.join()
        rig.watch(0, kept[0])
        rig.set(1, kept[1])
        rig.device.capturing = False
        rig.end_step()
        assert len(rig.buffer._flusher._captured.kept) == 4


def test_a_replayed_graph_adds_to_sums_that_were_forgotten_in_time() -> None:
    with Rig().training() as rig:
        x = rig.make()
        rig.device.capturing = True
        rig.see(0, x)
        rig.device.capturing = False
        rig.end_step()
        # A replay: the same launch again on the current stream, of which the buffer is told nothing.
        plan, table = rig.buffer._flusher._captured.kept[0]
        rig.buffer._flusher._reducer.launch(plan, table.on_device)
        rig.expected.add_input(0, x)
        rig.end_step()


def test_a_group_is_sent_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 2 * 6 * 70 * 4)
    with Rig(6).training() as rig:
        for site in range(6):
            rig.see(site, rig.make())
        assert rig.buffer.num_launches == 2 * 2
        for site in range(6):
            rig.watch(site, rig.make(70))
        rig.end_step()


def test_the_size_of_a_group_follows_the_step_before() -> None:
    size = groups.GroupSize()
    assert size.num_bytes == groups.MIN_GROUP_BYTES
    size.count(groups.NUM_GROUPS << 29)
    size.next_step()
    assert size.num_bytes == 1 << 29
    size.count(BIG)
    size.next_step()
    assert size.num_bytes == groups.MAX_GROUP_BYTES


def test_nothing_is_allocated_and_nobody_waits_once_it_runs() -> None:
    with Rig(frozen=(1,)).training() as rig:
        scale = torch.tensor(4.0)
        for step in range(8):
            for site in range(3):
                rig.see(site, rig.make())
            rig.buffer.flush()
            rig.watch(0, rig.make(70))
            rig.buffer.join()
            rig.set(2, rig.make(70))
            rig.end_step(torch.ones(()), scale=scale)
            if step == 3:
                rig.device.allocations.clear()
        assert rig.device.allocations == []
        assert rig.device.num_waits == 0
        assert rig.device.synchronised == []
