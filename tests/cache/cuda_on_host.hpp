// Enough of CUDA to run a kernel on the host: every thread of a block is a fiber, and they take turns at barriers and
// exchanges. Blocks run one after the other.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__ static

using std::min;

struct uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 blockIdx, gridDim, threadIdx;

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct __nv_bfloat16 {
  uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}
using __half = _Float16;
inline __half __float2half(float value) { return static_cast<__half>(value); }
inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __ushort_as_half(unsigned short bits) {
  __half value;
  std::memcpy(&value, &bits, 2);
  return value;
}

class Block {
 public:
  static void run(dim3 grid, unsigned threads, const std::function<void()>& kernel) {
    gridDim = grid;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
          Block(threads, kernel).go();
        }
      }
    }
  }

  static void barrier() { current->wait(current->everyone, current->live()); }

  static float exchange(float mine, int mask) {
    Block& block = *current;
    const unsigned me = block.now, warp = me / 32;
    block.slots[me] = mine;
    block.wait(block.warps[warp], 32);
    const float theirs = block.slots[me ^ mask];
    block.wait(block.warps[warp], 32);
    return theirs;
  }

 private:
  struct Gate {
    unsigned arrived = 0, turn = 0;
  };

  Block(unsigned threads, const std::function<void()>& kernel)
      : kernel(kernel), fibers(threads), stacks(threads), ended(threads), slots(threads), warps(threads / 32) {}

  unsigned live() const { return static_cast<unsigned>(std::count(ended.begin(), ended.end(), false)); }

  void wait(Gate& gate, unsigned expected) {
    const unsigned turn = gate.turn;
    if (++gate.arrived == expected) {
      gate.arrived = 0;
      ++gate.turn;
    }
    while (gate.turn == turn) {
      pause();
    }
  }

  void pause() {
    const unsigned me = now;
    swapcontext(&fibers[me], &home);
    now = me;
    threadIdx.x = me;
  }

  static void enter() {
    Block& block = *current;
    const unsigned me = block.now;
    block.kernel();
    block.ended[me] = true;
    swapcontext(&block.fibers[me], &block.home);
  }

  void go() {
    current = this;
    for (unsigned i = 0; i < fibers.size(); ++i) {
      stacks[i].resize(64 * 1024);
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i].data();
      fibers[i].uc_stack.ss_size = stacks[i].size();
      makecontext(&fibers[i], enter, 0);
    }
    while (live()) {
      for (now = 0; now < fibers.size(); ++now) {
        if (!ended[now]) {
          threadIdx.x = now;
          const unsigned me = now;
          swapcontext(&home, &fibers[me]);
          now = me;
        }
      }
    }
  }

  static inline Block* current = nullptr;
  const std::function<void()>& kernel;
  ucontext_t home;
  std::vector<ucontext_t> fibers;
  std::vector<std::vector<char>> stacks;
  std::vector<bool> ended;
  std::vector<float> slots;
  std::vector<Gate> warps;
  Gate everyone;
  unsigned now = 0;
};

inline void __syncthreads() { Block::barrier(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) { return Block::exchange(value, mask); }
