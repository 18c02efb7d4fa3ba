// Rows into an array of the pool, for CUDA.

namespace kvd {

// rows: [heads, count, per] from row `first` on into pool [heads, height, per], `per` loads to a row. done: where the
// pool lies on the device.
template <typename Load>
__global__ void write_rows(
    const Load* rows, const Load* pool, unsigned long long* done, int heads, int count, int per, int height,
    int first) {
  const long long number = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (number == 0) {
    *done = reinterpret_cast<unsigned long long>(pool);
  }
  if (number < static_cast<long long>(heads) * count * per) {
    const int part = number % per, row = number / per % count, head = number / per / count;
    const_cast<Load*>(pool)[(static_cast<long long>(head) * height + first + row) * per + part] = rows[number];
  }
}

// One row of each of `count` sequences into row at[i] of K and of V; into none where that is negative. A row is `words`
// of 4 bytes, and where it is quantised `groups` scales and as many biases. Rows: [count, heads, ...].
__global__ void write_quantised(
    const unsigned* k, const unsigned short* k_scales, const unsigned short* k_biases, const unsigned* v,
    const unsigned short* v_scales, const unsigned short* v_biases, const unsigned* pool_k,
    const unsigned short* pool_k_scales, const unsigned short* pool_k_biases, const unsigned* pool_v,
    const unsigned short* pool_v_scales, const unsigned short* pool_v_biases, const int* at, int* done, int count,
    int heads, int height, int k_words, int k_groups, int v_words, int v_groups) {
  const int number = blockIdx.x * blockDim.x + threadIdx.x;
  const int each = k_words + 2 * k_groups + v_words + 2 * v_groups, from = number / each, head = from % heads;
  if (number >= count * heads * each || at[from / heads] < 0) {
    return;
  }
  const long long into = static_cast<long long>(head) * height + at[from / heads];
  int n = number % each;
  auto copy = [&]<typename Item>(const Item* rows, const Item* pool, int width) {
    if (n >= 0 && n < width) {
      const_cast<Item*>(pool)[into * width + n] = rows[from * width + n];
    }
    n -= width;
  };
  copy(k, pool_k, k_words);
  copy(k_scales, pool_k_scales, k_groups);
  copy(k_biases, pool_k_biases, k_groups);
  copy(v, pool_v, v_words);
  copy(v_scales, pool_v_scales, v_groups);
  copy(v_biases, pool_v_biases, v_groups);
}

}  // namespace kvd
