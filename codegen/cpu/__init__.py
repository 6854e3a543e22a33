"""Code for CPUs.

``target`` feature levels, ``objectcode`` LLVM modules to machine code, ``image`` the linker, ``driver`` the thread team.
"""
