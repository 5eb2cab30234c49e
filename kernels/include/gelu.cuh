// gelu(x) = x * Phi(x) with the exact (erf) normal distribution, in fp32: the epilogue of a linear layer.
#pragma once
#include "include/ptx.cuh"

// gelu(x) = max(x, 0) - |x| * Q(|x|), where Q(a) = erfc(a / sqrt(2)) / 2 falls from 1/2 to 0. log2(Q) is close to a
// polynomial: the one of gkd/ops/gelu.py in base 2, within 7.5e-9 of Q. 14 instructions and no branch, which another
// block's tensor-core products can hide. The error is within 2 ulp of x, over all of fp32.
__device__ __forceinline__ float gelu(float x) {
    // Q(16) is 0 in fp32, and a bound on a keeps infinity * 0 out: gelu(inf) is inf.
    float a = fminf(fabsf(x), 16.0f);
    float log2_q = -2.7721892e-06f;
    log2_q = fmaf(log2_q, a, 3.862217e-05f);
    log2_q = fmaf(log2_q, a, -1.8255328e-04f);
    log2_q = fmaf(log2_q, a, -1.4585874e-04f);
    log2_q = fmaf(log2_q, a, 7.0754597e-03f);
    log2_q = fmaf(log2_q, a, -5.2505024e-02f);
    log2_q = fmaf(log2_q, a, -4.5920491e-01f);
    log2_q = fmaf(log2_q, a, -1.1511057f);
    log2_q = fmaf(log2_q, a, -9.9999998e-01f);
    // max(x, 0), exactly, and a NaN stays one.
    float positive_part = fmaf(0.5f, fabsf(x), 0.5f * x);
    return fmaf(-a, ex2_approx(log2_q), positive_part);
}
