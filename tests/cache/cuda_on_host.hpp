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

#define KVD_ON_HOST

using std::min;

struct uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 blockIdx, blockDim, gridDim, threadIdx;

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned order) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= unsigned(both >> (order >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return out;
}
inline float __ldcg(const float* from) { return *from; }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at += value;
  return before;
}

class Block {
 public:
  static void run(dim3 grid, unsigned threads, const std::function<void()>& kernel) {
    gridDim = grid;
    blockDim = {threads};
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
          Block(threads, kernel).go();
        }
      }
    }
  }

  static void barrier() { current->wait(current->everyone, current->live()); }

  // Every thread of a warp leaves `mine`; `use(warp)` sees what all 32 left.
  template <typename Mine, typename Use>
  static auto together(const Mine& mine, Use use) {
    Block& block = *current;
    const unsigned me = block.now, warp = me / 32;
    static_assert(sizeof(Mine) <= sizeof(Slot));
    std::memcpy(&block.slots[me], &mine, sizeof mine);
    block.wait(block.warps[warp], 32);
    auto result = use([&](unsigned lane) {
      Mine theirs;
      std::memcpy(&theirs, &block.slots[warp * 32 + lane], sizeof theirs);
      return theirs;
    });
    block.wait(block.warps[warp], 32);
    return result;
  }

 private:
  struct Slot {
    unsigned words[6];
  };
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
  std::vector<Slot> slots;
  std::vector<Gate> warps;
  Gate everyone;
  unsigned now = 0;
};

inline void __syncthreads() { Block::barrier(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  return Block::together(value, [&](auto of) { return of((threadIdx.x % 32) ^ mask); });
}

namespace kvd {

struct bfloat16 {
  unsigned short bits;
};
struct float16 {
  unsigned short bits;
};
inline unsigned rounded(float value, const bfloat16*) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}
inline unsigned rounded(float value, const float16*) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline float value_of(unsigned short bits, const bfloat16*) { return __uint_as_float(unsigned(bits) << 16); }
inline float value_of(unsigned short bits, const float16*) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
template <typename T>
unsigned pair_of(float low, float high, const T* kind) {
  return rounded(low, kind) | rounded(high, kind) << 16;
}
inline float power_of_two(float exponent) { return std::exp2(exponent); }

// What tensor cores do, after the tables of the PTX manual for m16n8k16: a thread's place in a tile.
struct Fragment {
  unsigned a[4], b[2];
};

template <typename T>
void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1, const T* kind) {
  const Fragment mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const unsigned lane = threadIdx.x % 32;
  Block::together(mine, [&](auto of) {
    auto left = [&](unsigned row, unsigned k) {
      const unsigned word = of(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2];
      return value_of(static_cast<unsigned short>(word >> k % 2 * 16), kind);
    };
    auto right = [&](unsigned k, unsigned column) {
      return value_of(static_cast<unsigned short>(of(column * 4 + k % 8 / 2).b[k / 8] >> k % 2 * 16), kind);
    };
    for (unsigned i = 0; i < 4; ++i) {
      for (unsigned k = 0; k < 16; ++k) {
        c[i] += left(lane / 4 + i / 2 * 8, k) * right(k, lane % 4 * 2 + i % 2);
      }
    }
    return 0;
  });
}

inline unsigned transposed(unsigned pair) {
  const unsigned lane = threadIdx.x % 32;
  return Block::together(pair, [&](auto of) {
    auto at = [&](unsigned row, unsigned column) { return of(row * 4 + column / 2) >> column % 2 * 16 & 0xffffu; };
    return at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
  });
}

}  // namespace kvd
