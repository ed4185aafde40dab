// The macros of the kernels' body for C++17: the 32 lanes of a simdgroup are computed in lockstep,
// and simdgroups one after the other between two barriers.
//
// Threadgroup memory knows who wrote and read each element since the last barrier: a race, or a
// read of what was never written, is counted.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <unordered_set>

#define FN inline
#define DEVICE
#define THREAD
#define UNROLL
// Not inlined: a file of many kernels compiles in a third of the time.
#define APART __attribute__((noinline))
#define LANES_OF(l) for (int l = 0; l < 32; ++l)

struct half_t {
  uint16_t bits;
  half_t() = default;
  explicit half_t(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint32_t sign = (u >> 16) & 0x8000;
    const float a = std::fabs(x);
    if (std::isnan(x)) bits = uint16_t(sign | 0x7e00);
    else if (a >= 65520.0f) bits = uint16_t(sign | 0x7c00);
    else if (a < 6.103515625e-05f) bits = uint16_t(sign | uint32_t(std::nearbyint(a * 16777216.0f)));
    else {
      uint32_t v;
      std::memcpy(&v, &a, 4);
      v += 0xfff + ((v >> 13) & 1);
      bits = uint16_t(sign | ((v - (112u << 23)) >> 13));
    }
  }
  operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, e = (bits >> 10) & 31, m = bits & 1023;
    float f;
    if (e == 0) {
      f = float(m) * 5.9604644775390625e-08f;
      return sign ? -f : f;
    }
    const uint32_t u = sign | ((e == 31 ? 255u : e + 112u) << 23) | (m << 13);
    std::memcpy(&f, &u, 4);
    return f;
  }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if (std::isnan(x)) { bits = uint16_t((u >> 16) | 64); return; }
    bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};

template <class N>
struct Lanes {
  N v[32];
  Lanes() = default;
  APART Lanes(N x) { LANES_OF(l) v[l] = x; }
  APART Lanes& operator+=(const Lanes& o) { LANES_OF(l) v[l] += o.v[l]; return *this; }
  APART Lanes& operator*=(const Lanes& o) { LANES_OF(l) v[l] *= o.v[l]; return *this; }
};
using VF = Lanes<float>;
using VI = Lanes<int>;
using VB = Lanes<bool>;

#define EACH(R, N, op)                                                                       \
  APART static R operator op(const N& a, const N& b) { R r; LANES_OF(l) r.v[l] = a.v[l] op b.v[l]; return r; }
EACH(VF, VF, +) EACH(VF, VF, -) EACH(VF, VF, *) EACH(VF, VF, /)
EACH(VI, VI, +) EACH(VI, VI, -) EACH(VI, VI, *) EACH(VI, VI, /) EACH(VI, VI, %)
EACH(VB, VF, <) EACH(VB, VF, >) EACH(VB, VF, <=) EACH(VB, VI, <) EACH(VB, VI, >=) EACH(VB, VI, ==)
EACH(VB, VB, &&) EACH(VB, VB, ||)
#undef EACH

APART static VF SELECT(const VB& c, const VF& a, const VF& b) {
  VF r;
  LANES_OF(l) r.v[l] = c.v[l] ? a.v[l] : b.v[l];
  return r;
}
APART static VF XOR_SHUFFLE(const VF& x, int m) {
  VF r;
  LANES_OF(l) r.v[l] = x.v[l ^ m];
  return r;
}
static inline float EXP2(float x) { return std::exp2(x); }
APART static VF EXP2(const VF& x) { VF r; LANES_OF(l) r.v[l] = std::exp2(x.v[l]); return r; }
static inline float MAX(float a, float b) { return std::fmax(a, b); }
APART static VF MAX(const VF& a, const VF& b) {
  VF r;
  LANES_OF(l) r.v[l] = std::fmax(a.v[l], b.v[l]);
  return r;
}

static int group_x, group_y, group_z, simdgroup, epoch, races;
static bool backwards;
#define GROUP_X group_x
#define GROUP_Y group_y
#define GROUP_Z group_z
#define SIMDGROUP simdgroup
APART static VI own_lane() { VI r; LANES_OF(l) r.v[l] = l; return r; }
#define LANE own_lane()
#define BARRIER ++epoch
#define ACROSS(type, name, n) type name[SIMDGROUPS][n]
#define MY(name) name[simdgroup]
#define FOR_SIMDGROUPS                                                            \
  for (int turn_ = 0; turn_ < SIMDGROUPS; ++turn_)                                \
    if (simdgroup = backwards ? SIMDGROUPS - 1 - turn_ : turn_; true)
#define FOR_LANES(l) LANES_OF(l)

// A pointer into a span's array, for tests: a number that is loaded twice is counted as a race.
static std::unordered_set<const void*> loaded_once;
template <class E>
struct Once {
  const E* at;
  Once(const E* from) : at(from) {}
  Once& operator+=(size_t n) { at += n; return *this; }
  Once operator+(int n) const { return at + n; }
  E operator[](int i) const {
    if (!loaded_once.insert(at + i).second) ++races;
    return at[i];
  }
};

template <class E>
struct Shadow {
  E value;
  int writer = -1, written = -1, read = -1;
  uint32_t readers = 0;
};
template <class E>
struct Cell {
  Shadow<E>* at;
  operator E() const {
    if (at->writer < 0 || (at->written == epoch && at->writer != simdgroup)) ++races;
    if (at->read != epoch) at->readers = 0;
    at->read = epoch;
    at->readers |= 1u << simdgroup;
    return at->value;
  }
  template <class F = E, class = std::enable_if_t<!std::is_same<F, float>::value>>
  explicit operator float() const { return float(E(*this)); }
  Cell& operator=(E x) {
    if (at->read == epoch && (at->readers & ~(1u << simdgroup))) ++races;
    if (at->written == epoch && at->writer != simdgroup) ++races;
    at->value = x;
    at->writer = simdgroup;
    at->written = epoch;
    return *this;
  }
};
template <class E>
struct SharedPointer {
  Shadow<E>* from;
  int count;
  Cell<E> operator[](int i) const {
    if (i < 0 || i >= count) __builtin_trap();
    return {from + i};
  }
  SharedPointer operator+(int i) const { return {from + i, count - i}; }
};
template <class E, int COUNT>
struct Shared {
  Shadow<E>* cells = new Shadow<E>[COUNT];
  ~Shared() { delete[] cells; }
  Cell<E> operator[](int i) const { return SharedPointer<E>(*this)[i]; }
  operator SharedPointer<E>() const { return {cells, COUNT}; }
};
#define SHARED(type, name, n) Shared<type, n> name
#define SHARED_POINTER(type) SharedPointer<type>

template <class P>
APART static void load_numbers(float* to, P from) {
  for (int e = 0; e < 8; ++e) to[e] = float(from[e]);
}
template <class S>
APART static void load_if(const VB& there, const S& source, VF* to, const VI& column, const VI& chunk) {
  LANES_OF(l) {
    float loaded[8] = {0};
    if (there.v[l]) source.load(loaded, column.v[l], chunk.v[l]);
    for (int e = 0; e < 8; ++e) to[e].v[l] = loaded[e];
  }
}
template <class P>
APART static VF load_one_if(const VB& there, P from, const VI& at) {
  VF r;
  LANES_OF(l) r.v[l] = there.v[l] ? float(from[at.v[l]]) : 0.0f;
  return r;
}
template <class T>
APART static void store_if(const VB& there, T* to, size_t at, const VI& behind, const VF& value) {
  LANES_OF(l) if (there.v[l]) to[at + behind.v[l]] = T(value.v[l]);
}
