"""A linker for one purpose: kernel objects to one flat, position-independent image.

Kernels refer to nothing outside the image, so loading needs no symbol resolution: all references are relative and resolved here. Layout:
the allocated
sections of all objects one after another. Anything that would need run-time relocation is refused, naming the symbol.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ggufc.codegen.errors import CodegenError

_SHT_SYMTAB, _SHT_RELA, _SHT_NOBITS = 2, 4, 8
_SHF_WRITE, _SHF_ALLOC = 1, 2
_EM_X86_64, _EM_AARCH64 = 62, 183
_R_X86_64_64, _R_X86_64_PC32, _R_X86_64_PLT32, _R_X86_64_PC64 = 1, 2, 4, 24
_R_AARCH64_PREL32, _R_AARCH64_PREL64 = 261, 260
_R_AARCH64_ADR_PREL_PG_HI21, _R_AARCH64_ADD_ABS_LO12_NC = 275, 277
_R_AARCH64_JUMP26, _R_AARCH64_CALL26 = 282, 283
_R_AARCH64_LDST_LO12 = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4}


@dataclass
class _Section:
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


@dataclass
class Image:
    """Machine code and its entry points: ``symbols[name] = (byte offset, size)``."""

    code: bytes
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class _Object:
    data: bytes
    machine: int
    sections: list[_Section]
    base: dict[int, int] = field(default_factory=dict)  # section index -> offset in the image


def _parse(data: bytes) -> _Object:
    if data[:4] != b"\x7fELF" or data[4] != 2 or data[5] != 1:
        raise CodegenError("internal: the object emitter did not produce a 64-bit little-endian ELF file")
    machine = struct.unpack_from("<H", data, 18)[0]
    shoff = struct.unpack_from("<Q", data, 40)[0]
    shentsize, shnum, shstrndx = struct.unpack_from("<HHH", data, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + i * shentsize) for i in range(shnum)]
    names = raw[shstrndx][4]

    def name(at: int) -> str:
        return data[names + at : data.index(b"\0", names + at)].decode()

    sections = [_Section(name(r[0]), r[1], r[2], r[4], r[5], r[6], r[7], r[8]) for r in raw]
    return _Object(data, machine, sections)


def _symbols(obj: _Object) -> list[tuple[str, int, int, int, int]]:
    """(name, section, value, size, binding) of the object's symbol table."""
    out = []
    for section in obj.sections:
        if section.type != _SHT_SYMTAB:
            continue
        strings = obj.sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            st_name, st_info, _, st_shndx, st_value, st_size = struct.unpack_from("<IBBHQQ", obj.data, at)
            end = obj.data.index(b"\0", strings + st_name)
            out.append((obj.data[strings + st_name : end].decode(), st_shndx, st_value, st_size, st_info >> 4))
    return out


def link(objects: list[bytes]) -> Image:
    """Place and relocate ``objects``; the first definition of a global name serves all.

    Raises CodegenError for references to undefined symbols, writable data or relocations that depend on the load address.
    """
    parsed = [_parse(data) for data in objects]
    code = bytearray()
    for obj in parsed:
        for index, section in enumerate(obj.sections):
            if not section.flags & _SHF_ALLOC or section.size == 0 or section.name.startswith(".eh_frame"):
                continue
            if section.type == _SHT_NOBITS or (section.flags & _SHF_WRITE and not section.name.startswith(".data.rel.ro")):
                raise CodegenError(f"internal: section {section.name} holds writable data; kernels must be stateless")
            code.extend(b"\0" * (-len(code) % max(64, section.align)))
            obj.base[index] = len(code)
            code.extend(obj.data[section.offset : section.offset + section.size])
    image = Image(b"")
    tables = [_symbols(obj) for obj in parsed]
    for obj, table in zip(parsed, tables):
        for name, home, value, size, binding in table:
            if binding and home in obj.base and name and name not in image.symbols:
                image.symbols[name] = (obj.base[home] + value, size)
    for obj, table in zip(parsed, tables):
        for section in obj.sections:
            if section.type != _SHT_RELA or section.info not in obj.base:
                continue
            for at in range(section.offset, section.offset + section.size, 24):
                offset, info, addend = struct.unpack_from("<QQq", obj.data, at)
                name, sym_section, value, _, _ = table[info >> 32]
                if sym_section in obj.base:
                    target = obj.base[sym_section] + value
                elif name in image.symbols:
                    target = image.symbols[name][0]
                else:
                    raise CodegenError(f"internal: a kernel refers to {name or 'an unnamed symbol'!r}, which is not part of the image")
                _relocate(code, obj.machine, info & 0xFFFFFFFF, obj.base[section.info] + offset, target + addend, name)
    image.code = bytes(code)
    return image


def _relocate(code: bytearray, machine: int, kind: int, place: int, target: int, name: str) -> None:
    if machine == _EM_X86_64:
        if kind in (_R_X86_64_PC32, _R_X86_64_PLT32):
            struct.pack_into("<i", code, place, target - place)
            return
        if kind == _R_X86_64_PC64:
            struct.pack_into("<q", code, place, target - place)
            return
    elif machine == _EM_AARCH64 and _relocate_aarch64(code, kind, place, target):
        return
    raise CodegenError(f"internal: relocation {kind} against {name!r} depends on the load address")


def _relocate_aarch64(code: bytearray, kind: int, place: int, target: int) -> bool:
    if kind in (_R_AARCH64_PREL32, _R_AARCH64_PREL64):
        struct.pack_into("<i" if kind == _R_AARCH64_PREL32 else "<q", code, place, target - place)
        return True
    (word,) = struct.unpack_from("<I", code, place)
    if kind in (_R_AARCH64_JUMP26, _R_AARCH64_CALL26):
        word |= ((target - place) >> 2) & 0x3FFFFFF
    elif kind == _R_AARCH64_ADR_PREL_PG_HI21:  # the image is mapped page-aligned
        pages = (target >> 12) - (place >> 12)
        word |= (pages & 3) << 29 | ((pages >> 2) & 0x7FFFF) << 5
    elif kind == _R_AARCH64_ADD_ABS_LO12_NC:
        word |= (target & 0xFFF) << 10
    elif kind in _R_AARCH64_LDST_LO12:
        word |= ((target & 0xFFF) >> _R_AARCH64_LDST_LO12[kind]) << 10
    else:
        return False
    struct.pack_into("<I", code, place, word)
    return True
