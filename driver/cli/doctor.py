"""``ggufc doctor``: what this machine offers, for bug reports."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import click

from ggufc import __version__

DEPENDENCIES = ("numpy", "llvmlite", "networkx", "gguf", "tokenizers", "jinja2", "click", "rich", "msgspec")
EXTRAS = {
    "hub": ("huggingface_hub", "pull from hf:"),
    "cuda": ("pycuda", "use NVIDIA GPUs through pycuda, and not through the driver's own library, which needs no package"),
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Show versions, CPU features, cores, the cache and the optional parts.

    Exits with 2 when something that ggufc needs is missing.
    """
    report, problems = examine()
    if as_json:
        click.echo(json.dumps({**report, "problems": problems}, indent=2))
    else:
        width = max(len(name) for name in report)
        for name, value in report.items():
            click.echo(f"{name:{width}}  {value}")
        for problem in problems:
            click.echo(f"problem: {problem}", err=True)
    if problems:
        raise click.exceptions.Exit(2)


def examine() -> tuple[dict[str, object], list[str]]:
    """The report in order of printing, and what is wrong."""
    from ggufc.files import size_words
    from ggufc.machine import cpu_name, memory
    from ggufc.models.registry import ARCHITECTURES
    from ggufc.runtime.cpuinfo import available_cpus, host_features, physical_cores
    from ggufc.runtime.paths import cache_dir

    problems: list[str] = []
    versions = {name: _version(name) for name in DEPENDENCIES}
    problems += [
        f"the package {name} is missing; install it with `pip install {name}`" for name, version in versions.items() if not version
    ]
    features = host_features()
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        problems.append(f"the cache folder {folder} cannot be written; set GGUFC_CACHE to another one")
    ram = memory()
    report: dict[str, object] = {
        "ggufc": f"{__version__} ({Path(__file__).resolve().parent.parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "llvm": _llvm(problems),
        "cpu": cpu_name(),
        "level": _level(features),
        "tiles": _tiles(),
        "architectures": ", ".join(sorted(ARCHITECTURES)),
        "weights": _weights(),
        "features": " ".join(sorted(features)) or "unknown (only baseline artifacts run)",
        "cores": f"{physical_cores()} physical, {len(available_cpus())} logical available",
        "memory": f"{size_words(ram[0])}, {size_words(ram[1])} available" if ram else "unknown",
        "cache": f"{folder} ({size_words(shutil.disk_usage(existing).free)} free)",
    }
    report |= _cuda()
    for extra, (package, purpose) in EXTRAS.items():
        version = _version(package)
        report[f"extra {extra}"] = f"{package} {version}" if version else f"not installed ({purpose}: `pip install 'ggufc[{extra}]'`)"
    return report, problems


def _cuda() -> dict[str, object]:
    """What running on NVIDIA GPUs would find: driver, devices and the code they take, assembler. Nothing of it is needed on a CPU."""
    from ggufc.files import size_words
    from ggufc.formats.errors import GgufcError
    from ggufc.runtime.cuda.device import NO_CUDA
    from ggufc.runtime.cuda.library_device import describe_devices

    try:
        version, devices = describe_devices()
    except GgufcError as why:
        return {"cuda": f"not available ({str(why).removeprefix(NO_CUDA)})", "ptxas": _ptxas()}
    found = [
        f"cuda:{i} {d.name}, sm_{d.capability}, {d.multiprocessors} multiprocessors, {size_words(d.memory)} "
        + f"({_gpu_code(d.capability, version)})"
        for i, d in enumerate(devices)
    ]
    driver = f"driver for CUDA {version}"
    if not found:
        return {"cuda": f"{driver}, no device visible (CUDA_VISIBLE_DEVICES hides devices)", "ptxas": _ptxas()}
    return {"cuda": "; ".join([driver, *found]), "ptxas": _ptxas()}


def _gpu_code(capability: int, driver: str) -> str:
    """The target for a device, its PTX version, and whether a driver for CUDA ``driver`` (``12.8``) loads that."""
    from ggufc.formats.cuda import DRIVERS, PTX_VERSIONS, newest_for

    best = newest_for(capability)
    if best is None:
        return "too old for ggufc"
    usable = newest_for(capability, tuple(int(part) for part in driver.split(".")))
    if usable == best:
        return f"--target native,cuda:{best}, PTX {PTX_VERSIONS[best] / 10:.1f}"
    needed = ".".join(str(part) for part in DRIVERS[PTX_VERSIONS[best]])
    words = f"cuda:{best} is PTX {PTX_VERSIONS[best] / 10:.1f}, which needs a driver for CUDA {needed} or newer"
    return f"{words}; update it, or --target native,cuda:{usable}" if usable else f"{words}; update it"


def _ptxas() -> str:
    """The assembler that ``inspect --ptx`` asks; comes with the code generator."""
    try:
        from ggufc.codegen.nvptx import assembler
    except (ImportError, OSError):
        return "not available"
    return f"{assembler.find()} {assembler.version()}" if assembler.find() else "not found (only `inspect --ptx` uses it)"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _llvm(problems: list[str]) -> str:
    try:
        import llvmlite.binding as llvm
    except (ImportError, OSError) as error:
        problems.append(f"llvmlite does not load ({error}); artifacts still run, compiling does not")
        return "not available"
    return ".".join(str(part) for part in llvm.llvm_version_info)


def _weights() -> str:
    """Types that can be multiplied; the table comes with the code generator, which needs LLVM."""
    try:
        from ggufc.codegen.weights import known_formats
    except (ImportError, OSError):
        return "not available"
    return " ".join(known_formats())


def _tiles() -> str:
    """AMX: whether the CPU has it and the system grants it."""
    from ggufc.formats.cpustate import TILE_FEATURES, tiles_granted
    from ggufc.runtime.cpuinfo import flag_features

    present = sorted(TILE_FEATURES & flag_features())
    if not present:
        return "none (the CPU has no AMX)"
    return " ".join(present) + ("" if tiles_granted() else ", not granted by this system (Linux 5.16 or newer is needed)")


def _level(features: frozenset[str]) -> str:
    from ggufc.codegen.cpu.target import strongest_level

    return strongest_level(features)
