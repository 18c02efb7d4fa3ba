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

// rows: [count, heads, per], each into row at[i] of the pool; into none where that is negative.
template <typename Load>
__global__ void write_each(
    const Load* rows, const Load* pool, const int* at, unsigned long long* done, int count, int heads, int per,
    int height) {
  const long long number = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (number == 0) {
    *done = reinterpret_cast<unsigned long long>(pool);
  }
  if (number < static_cast<long long>(count) * heads * per) {
    const int part = number % per, head = number / per % heads, into = at[number / per / heads];
    if (into >= 0) {
      const_cast<Load*>(pool)[(static_cast<long long>(head) * height + into) * per + part] = rows[number];
    }
  }
}

}  // namespace kvd
