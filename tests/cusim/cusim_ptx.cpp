// What a warp does together in the instructions of cusim_ptx.h, and a thread's asynchronous copies.
#include "cusim_ptx.h"

#include <immintrin.h>

#include <algorithm>

#include "cusim_runtime.h"

float cvt_f32_f16(unsigned short bits) { return _cvtsh_ss(bits); }
unsigned short cvt_f16_f32(float value) {
    return isnan(value) ? 0x7fff : _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

namespace cusim {
namespace {

void need_all_lanes(const char* name, uint32_t lanes) {
    if (lanes != ALL_LANES) fail("%s: needs all 32 lanes of the warp, has %#x", name, lanes);
}

constexpr unsigned NUM_MATRICES = 4, MATRIX_SIZE = 8;

// PTX ISA, ldmatrix: lane l gives row l % 8 of matrix l / 8, and receives elements (l / 4, 2 * (l % 4)) and the next of
// each matrix, or of its transpose.
template <bool TRANSPOSED>
void load_matrices(void* const (&arguments)[WARP_SIZE]) {
    for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
        for (unsigned matrix = 0; matrix < NUM_MATRICES; ++matrix) {
            auto element = [&](unsigned row, unsigned column) -> unsigned {
                if (TRANSPOSED) std::swap(row, column);
                return static_cast<MatrixLoad*>(arguments[matrix * MATRIX_SIZE + row])->row[column];
            };
            unsigned row = lane / 4, column = lane % 4 * 2;
            static_cast<MatrixLoad*>(arguments[lane])->matrix[matrix] =
                element(row, column) | element(row, column + 1) << 16;
        }
    }
}

// Of the low half of a register.
float widen_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
float widen_f16(unsigned bits) { return cvt_f32_f16(static_cast<unsigned short>(bits & 0xffff)); }

// PTX ISA, mma.m16n8k16 with 16-bit operands and m16n8k8 with tf32, of which a register holds PER_REGISTER, by group = lane / 4
// and place = lane % 4:
//   a[i]: row group + 8 * (i % 2), columns (place + 4 * (i / 2)) * PER_REGISTER and on
//   b[i]: rows (place + 4 * i) * PER_REGISTER and on, column group
//   d[i]: row group + 8 * (i / 2), column 2 * place + i % 2
template <unsigned PER_REGISTER, class Widen>
void multiply_matrices(void* const (&arguments)[WARP_SIZE], Widen widen) {
    constexpr unsigned NUM_K = 8 * PER_REGISTER;
    float a[16][NUM_K], b[NUM_K][8], d[16][8];
    for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
        auto* product = static_cast<const MatrixProduct*>(arguments[lane]);
        unsigned group = lane / 4, place = lane % 4;
        for (unsigned i = 0; i < 4; ++i) {
            for (unsigned j = 0; j < PER_REGISTER; ++j) {
                a[group + i % 2 * 8][(place + i / 2 * 4) * PER_REGISTER + j] = widen(product->a[i] >> 16 * j);
            }
            d[group + i / 2 * 8][place * 2 + i % 2] = product->d[i];
        }
        for (unsigned i = 0; i < 2; ++i) {
            for (unsigned j = 0; j < PER_REGISTER; ++j) {
                b[(place + i * 4) * PER_REGISTER + j][group] = widen(product->b[i] >> 16 * j);
            }
        }
    }
    // The instruction's own order of additions is not specified; this one is k ascending.
    for (unsigned row = 0; row < 16; ++row) {
        for (unsigned k = 0; k < NUM_K; ++k) {
            for (unsigned column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
        auto* product = static_cast<MatrixProduct*>(arguments[lane]);
        for (unsigned i = 0; i < 4; ++i) product->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

}  // namespace

void combine_ldmatrix(void* const (&arguments)[WARP_SIZE], uint32_t lanes) {
    need_all_lanes("ldmatrix", lanes);
    load_matrices<false>(arguments);
}
void combine_ldmatrix_trans(void* const (&arguments)[WARP_SIZE], uint32_t lanes) {
    need_all_lanes("ldmatrix.trans", lanes);
    load_matrices<true>(arguments);
}
void combine_mma_bf16(void* const (&arguments)[WARP_SIZE], uint32_t lanes) {
    need_all_lanes("mma", lanes);
    multiply_matrices<2>(arguments, widen_bf16);
}
void combine_mma_f16(void* const (&arguments)[WARP_SIZE], uint32_t lanes) {
    need_all_lanes("mma", lanes);
    multiply_matrices<2>(arguments, widen_f16);
}
void combine_mma_tf32(void* const (&arguments)[WARP_SIZE], uint32_t lanes) {
    need_all_lanes("mma", lanes);
    multiply_matrices<1>(arguments, widen_tf32);
}
float widen_tf32(unsigned bits) {
    float value = __uint_as_float(bits);
    if ((bits & 0x1fff) != 0 && !isnan(value)) fail("a product of tf32: an operand of %.9g was not rounded", double{value});
    return value;
}

void issue_copy(void* destination, const unsigned char (&data)[16]) {
    Copy copy{destination, {}, current->num_committed_groups};
    memcpy(copy.data, data, sizeof data);
    current->copies.push_back(copy);
}

void commit_copies() { ++current->num_committed_groups; }

void wait_for_copies(int num_pending_groups) {
    std::vector<Copy>& copies = current->copies;
    auto is_awaited = [&](const Copy& copy) {
        return static_cast<int>(copy.group) < static_cast<int>(current->num_committed_groups) - num_pending_groups;
    };
    auto end = std::find_if_not(copies.begin(), copies.end(), is_awaited);
    for (auto copy = copies.begin(); copy != end; ++copy) memcpy(copy->destination, copy->data, sizeof copy->data);
    copies.erase(copies.begin(), end);
}

}  // namespace cusim
