"""Products of bytes: four multiplications and their sum per 32-bit lane, as each feature level does them."""

from __future__ import annotations

from ggufc.codegen.emitter_arithmetic import I8, I16, I32, Arithmetic, Value, vec


class ByteProducts(Arithmetic):
    """Integer sums are exact, so all levels give the same bits."""

    def dot4(self, acc: Value, u: Value, s: Value, u_max: int = 255) -> Value:
        """Per i32 lane: ``acc + sum of 4 products`` of unsigned bytes ``u`` and signed bytes ``s``, exact.

        ``acc``: <n x i32>; ``u``, ``s``: <n x i32> whose bytes are the factors. ``u_max`` bounds the unsigned bytes: up to 127 the AVX2
        form cannot saturate in its 16-bit sums (2 * 127 * 128 < 32768) and is used as it is.
        """
        n = acc.type.count
        if self.target.is_arm and n == 4:
            return self._dot4_neon(acc, u, s, u_max)
        vnni = self.target.vnni
        if (vnni == "avx512" and n in (4, 8, 16)) or (vnni == "avx" and n in (4, 8)):
            ty = vec(I32, n)
            byte_ty = vec(I8, 4 * n)
            fn = self.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * n}", ty, [ty, byte_ty, byte_ty])
            return self.b.call(fn, [acc, self.b.bitcast(u, byte_ty), self.b.bitcast(s, byte_ty)])
        if "avx2" in self.target.features and n == 8:
            return self._dot4_avx2(acc, u, s, u_max)
        return self._dot4_plain(acc, u, s)

    def _dot4_avx2(self, acc: Value, u: Value, s: Value, u_max: int) -> Value:
        b, bytes_, words, ints = self.b, vec(I8, 32), vec(I16, 16), vec(I32, 8)
        maddubs = self.intrinsic("llvm.x86.avx2.pmadd.ub.sw", words, [bytes_, bytes_])
        maddwd = self.intrinsic("llvm.x86.avx2.pmadd.wd", ints, [words, words])
        sb = b.bitcast(s, bytes_)
        if u_max <= 127:
            pairs = b.call(maddubs, [b.bitcast(u, bytes_), sb])
            return b.add(acc, b.call(maddwd, [pairs, self.const(words, 1)]))
        low = b.bitcast(b.and_(u, self.const(ints, 0x7F7F7F7F)), bytes_)
        high = b.bitcast(b.and_(b.lshr(u, self.const(ints, 7)), self.const(ints, 0x01010101)), bytes_)
        acc = b.add(acc, b.call(maddwd, [b.call(maddubs, [low, sb]), self.const(words, 1)]))
        return b.add(acc, b.call(maddwd, [b.call(maddubs, [high, sb]), self.const(words, 128)]))

    def _dot4_plain(self, acc: Value, u: Value, s: Value) -> Value:
        if self.target.triple.startswith("x86_64") and acc.type.count == 4:
            return self._dot4_sse2(acc, u, s)
        b = self.b
        ty = acc.type
        for k in range(4):
            ub = b.and_(b.lshr(u, self.const(ty, 8 * k)), self.const(ty, 0xFF))
            sb = b.ashr(b.shl(s, self.const(ty, 24 - 8 * k)), self.const(ty, 24))
            acc = b.add(acc, b.mul(ub, sb))
        return acc

    def _dot4_sse2(self, acc: Value, u: Value, s: Value) -> Value:
        """Even and odd bytes widened to 16 bits, multiplied and added in pairs: no product or sum can overflow."""
        b, words = self.b, vec(I16, 8)
        madd = self.intrinsic("llvm.x86.sse2.pmadd.wd", acc.type, [words, words])
        uw, sw, eight = b.bitcast(u, words), b.bitcast(s, words), self.const(words, 8)
        even = b.call(madd, [b.and_(uw, self.const(words, 0xFF)), b.ashr(b.shl(sw, eight), eight)])
        odd = b.call(madd, [b.lshr(uw, eight), b.ashr(sw, eight)])
        return b.add(acc, b.add(even, odd))

    def _dot4_neon(self, acc: Value, u: Value, s: Value, u_max: int) -> Value:
        if self.target.vnni:
            return self._neon("usdot.v4i32.v16i8", acc, u, s)
        if u_max <= 127:
            return self.dot4_signed(acc, u, s)
        b, ty = self.b, acc.type
        acc = self.dot4_signed(acc, b.and_(u, self.const(ty, 0x7F7F7F7F)), s)
        top = b.and_(b.lshr(u, self.const(ty, 7)), self.const(ty, 0x01010101))
        return b.add(acc, b.shl(self.dot4_signed(self.const(ty, 0), top, s), self.const(ty, 7)))

    def dot4_signed(self, acc: Value, a: Value, s: Value) -> Value:
        """As ``dot4`` with both factors signed and bytes of ``s`` above -128, where ``multiplies_signed``."""
        if not self.target.is_arm:
            return self._dot4_signed_avx2(acc, a, s)
        if "dotprod" in self.target.features:
            return self._neon("sdot.v4i32.v16i8", acc, a, s)
        b, ints, words, bytes_ = self.b, vec(I32, 4), vec(I16, 8), vec(I8, 16)
        pairs = self.intrinsic("llvm.aarch64.neon.saddlp.v4i32.v8i16", ints, [words])
        halves = []
        for at in (0, 8):  # products of two signed bytes fit 16 bits, sums of two do not
            x, y = (b.sext(self.extract_vector(b.bitcast(v, bytes_), at, 8), words) for v in (a, s))
            halves.append(b.call(pairs, [b.mul(x, y)]))
        join = self.intrinsic("llvm.aarch64.neon.addp.v4i32", ints, [ints, ints])
        return b.add(acc, b.call(join, halves))

    @property
    def multiplies_signed(self) -> bool:
        """Whether ``dot4_signed`` is there and faster than ``dot4`` of bytes up to 255: NEON without ``usdot``, AVX2 without VNNI."""
        return self.target.signed_dot or ("avx2" in self.target.features and self.target.lanes == 8 and not self.target.vnni)

    def _dot4_signed_avx2(self, acc: Value, a: Value, s: Value) -> Value:
        """|a| times s with the sign of a; pairs cannot saturate (2 * 128 * 127 < 32768)."""
        b, bytes_, words, ints = self.b, vec(I8, 32), vec(I16, 16), vec(I32, 8)
        signed, factor = b.bitcast(a, bytes_), b.bitcast(s, bytes_)
        absolute = b.select(b.icmp_signed("<", signed, self.const(bytes_, 0)), b.neg(signed), signed)
        turned = b.call(self.intrinsic("llvm.x86.avx2.psign.b", bytes_, [bytes_, bytes_]), [factor, signed])
        pairs = b.call(self.intrinsic("llvm.x86.avx2.pmadd.ub.sw", words, [bytes_, bytes_]), [absolute, turned])
        return b.add(acc, b.call(self.intrinsic("llvm.x86.avx2.pmadd.wd", ints, [words, words]), [pairs, self.const(words, 1)]))

    def _neon(self, name: str, acc: Value, a: Value, s: Value) -> Value:
        bytes_ = vec(I8, 16)
        fn = self.intrinsic(f"llvm.aarch64.neon.{name}", acc.type, [acc.type, bytes_, bytes_])
        return self.b.call(fn, [acc, self.b.bitcast(a, bytes_), self.b.bitcast(s, bytes_)])
