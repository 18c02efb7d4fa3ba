// Attention of a decode step over a paged KV pool, for CUDA, in one launch: new rows are written, all rows read once.
//
// The rows of a sequence are split over blocks, those of a block over its warps; a warp takes 16 rows at a time to the
// tensor cores, for all query heads of a KV head together. The last block of a sequence joins what the others found.
// Halves (float16, bfloat16), or quantised rows that become halves in registers; D is a multiple of 32, DV of 64, at
// most eight query heads for a KV head.
//
// The order of dimensions within a product is free as long as both sides have the same: that lets every thread load 16
// bytes of a row as they lie in memory, or all that a few words hold.

namespace kvd {

constexpr unsigned ALL = 0xffffffffu;
constexpr float LEAST = -1e38f;  // below every score that is one
constexpr int STEP = 16;  // rows that a warp takes at a time: the height of a tensor core's tile

#ifndef KVD_ON_HOST
using size_t = unsigned long long;
using int32_t = int;
using uint32_t = unsigned;
struct bfloat16 {
  unsigned short bits;
};
struct float16 {
  unsigned short bits;
};

// c[16 x 8] += a[16 x 16] b[16 x 8], spread over a warp as the PTX manual has it.
__device__ inline void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1, const bfloat16*) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1, const float16*) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// An 8 x 8 tile of halves, spread over a warp in pairs, transposed.
__device__ inline unsigned transposed(unsigned pair) {
  unsigned out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}
__device__ inline unsigned pair_of(float low, float high, const bfloat16*) {
  unsigned out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ inline unsigned pair_of(float low, float high, const float16*) {
  unsigned out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ inline float value_of(unsigned short bits, const bfloat16*) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}
__device__ inline float value_of(unsigned short bits, const float16*) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}
__device__ inline float power_of_two(float exponent) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(exponent));
  return out;
}
#endif

// The score of a row that is not there: minus infinity.
__device__ inline float nothing() { return __uint_as_float(0xff800000u); }
// A sum by its total of weights; nothing at all is zero.
__device__ inline float share(float sum, float all) { return all > 0.0f ? sum / all : 0.0f; }
template <typename T>
__device__ inline void narrow(float value, T* out) {
  out->bits = static_cast<unsigned short>(pair_of(value, 0.0f, out));
}
// Halves, eight at a time.
template <typename T>
__device__ inline const uint4* of(const T* halves) {
  return reinterpret_cast<const uint4*>(halves);
}

// Rows of K or V as the pool has them: halves, or words with scales and biases.
template <typename T>
struct Side {
  const void* rows;
  const T *scales, *biases;
};

// What one of LANES threads holds of a row of DIM elements, in parts of eight halves. Quantised: BITS each, GROUP of
// them with a scale and a bias, which a thread's share is not wider than.
template <typename T, int DIM, int LANES, int BITS, int GROUP>
struct Share {
  static constexpr bool HALVES = false;
  static constexpr int EACH = DIM / LANES, PARTS = EACH / 8, WORDS = EACH * BITS / 32;
  static_assert(GROUP % EACH == 0 && EACH * BITS % 32 == 0);
  unsigned words[WORDS];
  float scale, bias;

  static __device__ int first_of(int part, int lane) { return lane * EACH + part * 8; }

  __device__ void load(const Side<T>& side, size_t row, const T*, int lane) {
    const unsigned* from = static_cast<const unsigned*>(side.rows) + (row * LANES + lane) * WORDS;
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
      for (int n = 0; n < WORDS / 4; ++n) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[n];
        words[4 * n] = four.x, words[4 * n + 1] = four.y, words[4 * n + 2] = four.z, words[4 * n + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int n = 0; n < WORDS; ++n) {
        words[n] = from[n];
      }
    }
    const size_t group = row * (DIM / GROUP) + lane * EACH / GROUP;
    scale = value_of(side.scales[group].bits, side.scales);
    bias = value_of(side.biases[group].bits, side.biases);
  }

  __device__ uint4 part(int number) const {
    unsigned out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = pair_of(value(number * 8 + 2 * i), value(number * 8 + 2 * i + 1), static_cast<const T*>(nullptr));
    }
    return {out[0], out[1], out[2], out[3]};
  }

  __device__ float value(int number) const {
    const unsigned digit = words[number * BITS / 32] >> number * BITS % 32 & ((1u << BITS) - 1);
    return fmaf(__uint_as_float(0x4b000000u | digit) - 8388608.0f, scale, bias);  // 2^23 + digit ends in its bits
  }
};

template <typename T, int DIM, int LANES>
struct Share<T, DIM, LANES, 16, 0> {
  static constexpr bool HALVES = true;
  static constexpr int PARTS = DIM / LANES / 8;
  uint4 parts[PARTS];

  static __device__ int first_of(int part, int lane) { return (part * LANES + lane) * 8; }

  // fresh: the row itself, where it is not in the pool yet.
  __device__ void load(const Side<T>& side, size_t row, const T* fresh, int lane) {
    const T* from = fresh ? fresh : static_cast<const T*>(side.rows) + row * DIM;
#pragma unroll
    for (int n = 0; n < PARTS; ++n) {
      parts[n] = *of(from + first_of(n, lane));
    }
  }

  __device__ const uint4& part(int number) const { return parts[number]; }
};

// One block: one of the splits of one sequence, for the G query heads of one KV head. WARPS * 32 threads.
//
// q: [G, D]. k, v: this head's rows of the pool, K and V their shares. The sequence's rows are those of the blocks in
// `table`, of 1 << shift rows each, or without one `length` rows from `first` on; of no rows the result is zero. write:
// its last row is not in the pool yet but in new_k [D] and new_v [DV]; it is brought there (halves only). scale has
// log2(e) in it: exponentials are powers of two. scratch: [splits, G, DV + 2] floats; arrived: zero, and zero again
// afterwards. out: [G, DV].
template <typename T, int D, int DV, int G, int WARPS, typename K, typename V>
__device__ void attend(
    const T* q, const Side<T>& k, const Side<T>& v, bool write, const T* new_k, const T* new_v, const uint32_t* table,
    int shift, int first, int length, float scale, int splits, int split, float* scratch, unsigned* arrived, T* out) {
  constexpr int THREADS = WARPS * 32, K_PARTS = K::PARTS, V_PARTS = V::PARTS;
  __shared__ float mixed[WARPS][G][DV];
  __shared__ float tops[WARPS][8], totals[WARPS][8];
  __shared__ bool last;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row = lane / 4, column = lane % 4;  // of a tile
  const int turns = (length + STEP * WARPS - 1) / (STEP * WARPS);
  const int begin = static_cast<int>(static_cast<long long>(turns) * split / splits) * STEP * WARPS;
  const int end = min(length, static_cast<int>(static_cast<long long>(turns) * (split + 1) / splits) * STEP * WARPS);
  const int fresh = write ? length - 1 : -1;

  auto place = [&](int at) {  // in the pool, of the first of 16 rows
    return table ? (static_cast<size_t>(table[at >> shift]) << shift) + (at & ((1 << shift) - 1))
                 : static_cast<size_t>(first) + at;
  };
  uint4 query[K_PARTS];
#pragma unroll
  for (int t = 0; t < K_PARTS; ++t) {
    query[t] = row < G ? *of(q + row * D + K::first_of(t, column)) : uint4{0, 0, 0, 0};
  }
  float mix[V_PARTS][4][4];
#pragma unroll
  for (int h = 0; h < V_PARTS; ++h) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mix[h][j][i] = 0.0f;
      }
    }
  }
  float top[2] = {nothing(), nothing()}, total[2] = {0.0f, 0.0f};

  K keys[2];
  V values[4];
  auto load_keys = [&](int at) {
    const size_t base = place(at);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int mine = min(at + row + 8 * n, length - 1);
      keys[n].load(k, base + mine - at, mine == fresh ? new_k : nullptr, column);
    }
  };
  auto load_values = [&](int at) {
    const size_t base = place(at);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int mine = min(at + 2 * column + n % 2 + n / 2 * 8, length - 1);
      values[n].load(v, base + mine - at, mine == fresh ? new_v : nullptr, row);
    }
  };

  int at = begin + warp * STEP;
  if (at < end) {
    load_keys(at);
  }
  for (; at < end; at += STEP * WARPS) {
    load_values(at);
    float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // rows `row` and `row + 8`, heads 2 * column and the next
#pragma unroll
    for (int t = 0; t < K_PARTS; ++t) {
      const uint4 &a = keys[0].part(t), &b = keys[1].part(t);
      const unsigned left[4] = {a.x, b.x, a.y, b.y}, right[4] = {a.z, b.z, a.w, b.w};
      multiply(scores, left, query[t].x, query[t].y, q);
      multiply(scores, right, query[t].z, query[t].w, q);
    }
    if (at + STEP * WARPS < end) {
      load_keys(at + STEP * WARPS);
    }
    float weights[4], shrink[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = at + row + i / 2 * 8 < length ? scores[i] * scale : nothing();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = fmaxf(scores[i], scores[i + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
      }
      most = fmaxf(most, top[i]);
      shrink[i] = power_of_two(top[i] - most);
      top[i] = most;
      weights[i] = power_of_two(scores[i] - most);
      weights[i + 2] = power_of_two(scores[i + 2] - most);
      total[i] = total[i] * shrink[i] + weights[i] + weights[i + 2];
    }
    const unsigned upper = transposed(pair_of(weights[0], weights[1], q));
    const unsigned lower = transposed(pair_of(weights[2], weights[3], q));
#pragma unroll
    for (int h = 0; h < V_PARTS; ++h) {
      unsigned rows[4][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4& part = values[n].part(h);
        rows[n][0] = part.x, rows[n][1] = part.y, rows[n][2] = part.z, rows[n][3] = part.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mix[h][j][i] *= shrink[i % 2];
        }
        const unsigned tile[4] = {
            __byte_perm(rows[0][j], rows[1][j], 0x5410), __byte_perm(rows[0][j], rows[1][j], 0x7632),
            __byte_perm(rows[2][j], rows[3][j], 0x5410), __byte_perm(rows[2][j], rows[3][j], 0x7632)};
        multiply(mix[h][j], tile, upper, lower, q);
      }
    }
    if constexpr (K::HALVES && V::HALVES) {
      if (at <= fresh && fresh < at + STEP) {
        const size_t into = place(at) + fresh - at;
        if (lane < D / 8) {
          static_cast<uint4*>(const_cast<void*>(k.rows))[into * (D / 8) + lane] = of(new_k)[lane];
        }
        if (lane < DV / 8) {
          static_cast<uint4*>(const_cast<void*>(v.rows))[into * (DV / 8) + lane] = of(new_v)[lane];
        }
      }
    }
  }

  // The warps of this block joined.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      total[i] += __shfl_xor_sync(ALL, total[i], step);
    }
    if (row == 0) {
      tops[warp][2 * column + i] = top[i];
      totals[warp][2 * column + i] = total[i];
    }
  }
#pragma unroll
  for (int h = 0; h < V_PARTS; ++h) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int g = 2 * column + i % 2;
        if (g < G) {
          mixed[warp][g][V::first_of(h, row) + 2 * j + i / 2] = mix[h][j][i];
        }
      }
    }
  }
  __syncthreads();
  constexpr int EACH = (G * DV + THREADS - 1) / THREADS;
  float* mine = scratch + static_cast<size_t>(split) * G * (DV + 2);  // [splits, G, DV + 2]: sums, largest, total
#pragma unroll 1
  for (int n = 0; n < EACH; ++n) {
    const int i = thread + n * THREADS, g = i / DV;
    if (i < G * DV) {
      float most = tops[0][g];
#pragma unroll
      for (int other = 1; other < WARPS; ++other) {
        most = fmaxf(most, tops[other][g]);
      }
      float sum = 0.0f, all = 0.0f;
#pragma unroll 2
      for (int other = 0; other < WARPS; ++other) {
        const float weight = tops[other][g] == nothing() ? 0.0f : power_of_two(tops[other][g] - most);
        sum += weight * mixed[other][g][i % DV];
        all += weight * totals[other][g];
      }
      if (splits == 1) {
        narrow(share(sum, all), out + i);
      } else {
        mine[g * (DV + 2) + i % DV] = sum;
        if (i % DV == 0) {
          mine[g * (DV + 2) + DV] = most;
          mine[g * (DV + 2) + DV + 1] = all;
        }
      }
    }
  }
  if (splits == 1) {
    return;
  }
  // The last block to arrive joins the splits.
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    last = atomicAdd(arrived, 1u) == static_cast<unsigned>(splits - 1);
  }
  __syncthreads();
  if (!last) {
    return;
  }
  __threadfence();
  if (thread == 0) {
    *arrived = 0;
  }
#pragma unroll 1
  for (int n = 0; n < EACH; ++n) {
    const int i = thread + n * THREADS;
    if (i >= G * DV) {
      break;
    }
    const float* of = scratch + static_cast<size_t>(i / DV) * (DV + 2);
    float most = LEAST, sum = 0.0f, all = 0.0f;
#pragma unroll 4
    for (int other = 0; other < splits; ++other) {
      most = fmaxf(most, __ldcg(of + static_cast<size_t>(other) * G * (DV + 2) + DV));
    }
#pragma unroll 4
    for (int other = 0; other < splits; ++other) {
      const float* there = of + static_cast<size_t>(other) * G * (DV + 2);
      const float weight = power_of_two(__ldcg(there + DV) - most);
      all += weight * __ldcg(there + DV + 1);
      sum += weight * __ldcg(there + i % DV);
    }
    narrow(share(sum, all), out + i);
  }
}

#ifndef KVD_ON_HOST
// A block for each split, KV head and sequence. first < 0: rows by `blocks` [sequences, width] and `lengths`. Bits 16
// and group 0: halves. What comes before this is among its inputs; of that one nothing is read.
template <typename T, int D, int DV, int G, int WARPS, int K_BITS, int K_GROUP, int V_BITS, int V_GROUP>
__global__ void __launch_bounds__(WARPS * 32) decode(
    const T* q, const T* k, const T* k_scales, const T* k_biases, const T* v, const T* v_scales, const T* v_biases,
    const T* new_k, const T* new_v, const unsigned* blocks, const int* lengths, float* scratch, unsigned* arrived,
    const void*, T* out, int height, int width, int shift, int first, int length, int write, float scale) {
  const int head = blockIdx.y, sequence = blockIdx.z;
  const size_t both = static_cast<size_t>(sequence) * gridDim.y + head, above = static_cast<size_t>(head) * height;
  const bool run = first >= 0;
  constexpr int K_EACH = K_GROUP ? D / K_GROUP : 0, V_EACH = V_GROUP ? DV / V_GROUP : 0;
  attend<T, D, DV, G, WARPS, Share<T, D, 4, K_BITS, K_GROUP>, Share<T, DV, 8, V_BITS, V_GROUP>>(
      q + both * G * D, {k + above * (D * K_BITS / 16), k_scales + above * K_EACH, k_biases + above * K_EACH},
      {v + above * (DV * V_BITS / 16), v_scales + above * V_EACH, v_biases + above * V_EACH}, write, new_k + both * D,
      new_v + both * DV, run ? nullptr : blocks + static_cast<size_t>(sequence) * width, shift, first,
      run ? length : lengths[sequence], scale, gridDim.x, blockIdx.x, scratch + both * gridDim.x * G * (DV + 2),
      arrived + both, out + both * G * DV);
}
#endif

}  // namespace kvd
