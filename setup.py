"""Build the compiled core with CMake and install `kernels/` as the package `pyscan.kernels`."""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "pyscan" / "__init__.py").read_text())[1]

EXTRAS = {
    "cli": ["rich>=13"],
    "arrow": ["pyarrow>=15"],
    "pandas": ["pandas>=2"],
    "demo": ["rich>=13", "tokenizers>=0.20", "transformers>=4.48"],
    "transformers": ["transformers>=4.48", "accelerate>=1.0"],
    "scan": ["rich>=13", "tokenizers>=0.20", "transformers>=4.48", "jinja2>=3.1"],
    "lightning": ["lightning>=2.2"],
    "accelerate": ["accelerate>=1.0"],
    "wandb": ["wandb>=0.19.10", "pillow>=10"],
    "tensorboard": ["tensorboard>=2.11"],
    "view": ["plotly>=5.20"],
    "ranks": ["pyarrow>=14", "duckdb>=1.0", "dask[dataframe]>=2024.8"],
}
# Tools of others, for the benchmarks alone.
PEERS = ["mindstudio-probe>=26.2", "nvdlfw_inspect>=0.2.2", "wandb>=0.19.10"]
EXTRAS["all"] = sorted({requirement for group in EXTRAS.values() for requirement in group})
EXTRAS["peers"] = PEERS


class CMakeBuild(build_ext):
    """Hand each extension to CMake; the compiler sees no torch header and no torch has to be installed."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        options = [
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('PYSCAN_BUILD_TYPE', 'Release')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPYSCAN_VERSION={VERSION}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        subprocess.check_call(["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *options])
        subprocess.check_call(["cmake", "--build", str(build), "--target", "_C"])


setup(
    name="pyscan",
    version=VERSION,
    description="An always-on scanner for PyTorch training: activation and gradient norms of every weight, every step",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["pyscan", "pyscan.commands", "pyscan.examples", "pyscan.integrations", "pyscan.kernels", "pyscan.viewer"],
    package_dir={"pyscan": "pyscan", "pyscan.examples": "examples", "pyscan.kernels": "kernels"},
    package_data={"pyscan": ["py.typed", "_C.pyi"], "pyscan.viewer": ["static/*"]},
    ext_modules=[Extension("pyscan._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=["numpy>=1.24", "torch>=2.6", 'triton>=3.2; platform_system == "Linux"'],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["pyscan = pyscan.cli:main"]},
    zip_safe=False,
)
