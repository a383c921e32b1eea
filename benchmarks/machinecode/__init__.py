"""Runs the machine code of a kernel on the CPU, lane by lane, and counts what a warp issues.

NVRTC, which comes with torch's CUDA builds, compiles; nvdisasm, which comes with Triton, lists the instructions;
:mod:`machinecode.operations` says what each one does to the registers of :mod:`machinecode.warp`. No driver and no GPU
takes part, so that what a change costs is known before anything is timed. Known are sm_80, sm_90 and sm_120.

What a warp takes in time, caches, and the last bits of ``MUFU`` (exponentials, reciprocals and roots, which are the
nearest float here) are not modelled.
"""
