// Attention of decode steps over a paged KV pool, for CUDA: one launch per piece of the rows, one that joins the pieces.
//
// A row is read in loads of 16 bytes: D * sizeof(T) / 16 must be a power of two up to 32. K and V lie as the pool keeps them,
// [kv_heads, pool_rows, D]; `table` [batch, width] lists each sequence's blocks, `lengths` [batch] its rows. Queries are
// [batch, kv_heads, G, D]. `scale` has log2(e) in it: exponentials are powers of two.

namespace kvd {

constexpr unsigned ALL = 0xffffffffu;

template <typename T>
struct Lanes {
  static constexpr int WIDE = 16 / sizeof(T);  // elements of one load
};

__device__ inline void widen(const float*, const uint4& raw, float* out) {
  out[0] = __uint_as_float(raw.x);
  out[1] = __uint_as_float(raw.y);
  out[2] = __uint_as_float(raw.z);
  out[3] = __uint_as_float(raw.w);
}

__device__ inline void widen(const __nv_bfloat16*, const uint4& raw, float* out) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ inline void widen(const __half*, const uint4& raw, float* out) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
    out[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
  }
}

__device__ inline void narrow(float value, float* out) { *out = value; }
__device__ inline void narrow(float value, __nv_bfloat16* out) { *out = __float2bfloat16(value); }
__device__ inline void narrow(float value, __half* out) { *out = __float2half(value); }

// Where row `at` of a sequence lies in the pool.
template <int BLOCK>
__device__ inline size_t place(const uint32_t* table, int at) {
  return static_cast<size_t>(table[at / BLOCK]) * BLOCK + at % BLOCK;
}

// Rows [split * SPLIT, + SPLIT) of one sequence for the G query heads of one KV head.
// grid (batch * splits, kv_heads), WARPS * 32 threads; neighbours are the same rows of different sequences, so that what
// they share is read from memory once. Writes the sum of exponentials times V, not normalised, to
// partial [batch, kv_heads, splits, G, DV] and (largest score, sum of exponentials) to stats [..., G, 2]; nothing where
// the sequence has no rows.
template <typename T, int D, int DV, int G, int BLOCK, int SPLIT, int WARPS>
__device__ void attend_split(
    const T* q, const T* k, const T* v, const uint32_t* table, const int32_t* lengths, float scale, int pool_rows,
    int width, int batch, float* partial, float* stats) {
  constexpr int WIDE = Lanes<T>::WIDE;
  constexpr int K_LANES = D / WIDE, V_LANES = DV / WIDE;
  constexpr int K_SLOTS = WARPS * 32 / K_LANES, V_SLOTS = WARPS * 32 / V_LANES;
  __shared__ float scores[G][SPLIT];
  __shared__ float mixed[WARPS][G][DV];

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int split = blockIdx.x / batch, sequence = blockIdx.x % batch, head = blockIdx.y;
  const int heads = gridDim.y, splits = gridDim.x / batch;
  const int first = split * SPLIT;
  const int count = min(SPLIT, lengths[sequence] - first);
  if (count <= 0) {
    return;
  }
  table += static_cast<size_t>(sequence) * width;
  const size_t base = static_cast<size_t>(head) * pool_rows;
  const bool whole = SPLIT <= BLOCK;  // the split lies within one block
  const size_t start = base + place<BLOCK>(table, first);

  {  // scores
    const int part = thread % K_LANES, slot = thread / K_LANES;
    float query[G][WIDE];
    const T* mine = q + (static_cast<size_t>(sequence) * heads + head) * G * D + part * WIDE;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      widen(q, *reinterpret_cast<const uint4*>(mine + g * D), query[g]);
#pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        query[g][i] *= scale;
      }
    }
    // All lanes of a warp take the same turns, since they exchange values: rows past the end repeat the last one.
#pragma unroll 4
    for (int from = 0; from < count; from += K_SLOTS) {
      const int row = from + slot;
      const int safe = min(row, count - 1);
      const size_t at = whole ? start + safe : base + place<BLOCK>(table, first + safe);
      float key[WIDE];
      widen(k, *reinterpret_cast<const uint4*>(k + at * D + part * WIDE), key);
      float sums[G];
#pragma unroll
      for (int g = 0; g < G; ++g) {
        sums[g] = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
          sums[g] += query[g][i] * key[i];
        }
#pragma unroll
        for (int step = K_LANES / 2; step > 0; step /= 2) {
          sums[g] += __shfl_xor_sync(ALL, sums[g], step);
        }
      }
      if (part == 0 && row < count) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          scores[g][row] = sums[g];
        }
      }
    }
  }
  __syncthreads();

  const size_t out = ((static_cast<size_t>(sequence) * heads + head) * splits + split) * G;
  for (int g = warp; g < G; g += WARPS) {  // exponentials
    float largest = -INFINITY;
    for (int row = lane; row < count; row += 32) {
      largest = fmaxf(largest, scores[g][row]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, step));
    }
    float sum = 0.0f;
    for (int row = lane; row < count; row += 32) {
      const float weight = exp2f(scores[g][row] - largest);
      scores[g][row] = weight;
      sum += weight;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(ALL, sum, step);
    }
    if (lane == 0) {
      stats[(out + g) * 2] = largest;
      stats[(out + g) * 2 + 1] = sum;
    }
  }
  __syncthreads();

  {  // times V
    const int part = thread % V_LANES, slot = thread / V_LANES;
    float mix[G][WIDE];
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        mix[g][i] = 0.0f;
      }
    }
#pragma unroll 4
    for (int row = slot; row < count; row += V_SLOTS) {
      const size_t at = whole ? start + row : base + place<BLOCK>(table, first + row);
      float value[WIDE];
      widen(v, *reinterpret_cast<const uint4*>(v + at * DV + part * WIDE), value);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const float weight = scores[g][row];
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
          mix[g][i] += weight * value[i];
        }
      }
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int i = 0; i < WIDE; ++i) {
#pragma unroll
        for (int step = V_LANES; step < 32; step *= 2) {
          mix[g][i] += __shfl_xor_sync(ALL, mix[g][i], step);
        }
        if (lane < V_LANES) {
          mixed[warp][g][part * WIDE + i] = mix[g][i];
        }
      }
    }
  }
  __syncthreads();
  for (int i = thread; i < G * DV; i += WARPS * 32) {
    const int g = i / DV, column = i % DV;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
      sum += mixed[other][g][column];
    }
    partial[out * DV + i] = sum;
  }
}

// The splits of one query head joined: grid (G, kv_heads, batch), PARTS * DV threads. out is [batch, kv_heads, G, DV].
template <typename T, int DV, int G, int SPLIT, int PARTS>
__device__ void join_splits(
    const float* partial, const float* stats, const int32_t* lengths, int splits, T* out) {
  __shared__ float sums[PARTS][DV];
  __shared__ float tops[PARTS];
  __shared__ float totals[PARTS];
  const int column = threadIdx.x % DV, part = threadIdx.x / DV;
  const int g = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  const int heads = gridDim.y;
  const int used = (lengths[sequence] + SPLIT - 1) / SPLIT;
  const size_t first = (static_cast<size_t>(sequence) * heads + head) * splits * G + g;
  float top = -INFINITY;
  for (int split = part; split < used; split += PARTS) {
    top = fmaxf(top, stats[(first + static_cast<size_t>(split) * G) * 2]);
  }
  float sum = 0.0f, total = 0.0f;
#pragma unroll 8
  for (int split = part; split < used; split += PARTS) {
    const size_t at = first + static_cast<size_t>(split) * G;
    const float weight = exp2f(stats[at * 2] - top);
    total += weight * stats[at * 2 + 1];
    sum += weight * partial[at * DV + column];
  }
  sums[part][column] = sum;
  if (column == 0) {
    tops[part] = top;
    totals[part] = total;
  }
  __syncthreads();
  if (part == 0) {
    float most = tops[0];
#pragma unroll
    for (int i = 1; i < PARTS; ++i) {
      most = fmaxf(most, tops[i]);
    }
    float above = 0.0f, below = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const float weight = exp2f(tops[i] - most);  // 0 for a part without splits
      above += weight * sums[i][column];
      below += weight * totals[i];
    }
    narrow(above / below, out + ((static_cast<size_t>(sequence) * heads + head) * G + g) * DV + column);
  }
}

}  // namespace kvd
