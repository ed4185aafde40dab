// Macros of body.h for CUDA.
#define FN __device__ __forceinline__
#define DEVICE
#define THREAD
#define VF float
#define VI int
#define VB bool
#define UNROLL _Pragma("unroll")
#define XOR_SHUFFLE(x, m) __shfl_xor_sync(0xffffffffu, x, m)
#define EXP2(x) exp2f(x)
#define MAX(a, b) fmaxf(a, b)
#define SELECT(c, a, b) ((c) ? (a) : (b))
#define BARRIER __syncthreads()
#define ACROSS(type, name, n) type name[n]
#define MY(name) name
#define FOR_SIMDGROUPS
#define FOR_LANES(l) for (int l = LANE, once_ = 1; once_; once_ = 0)
#define SHARED(type, name, n) __shared__ __align__(16) type name[n]
#define SHARED_POINTER(type) const type*
#define GROUP_X blockIdx.x
#define GROUP_Y blockIdx.y
#define GROUP_Z blockIdx.z
#define SIMDGROUP (threadIdx.x / 32)
#define LANE (int(threadIdx.x) % 32)

// Loads 16 bytes at a time: columns and the starts of arrays are multiples of 16 values.
#define LOADS_NUMBERS
template <class T>
struct __align__(16) Loaded {
  T numbers[16 / sizeof(T)];
};

template <class T>
FN void load_numbers(float* to, const T* from) {
  const int each = 16 / sizeof(T);
  UNROLL
  for (int part = 0; part < 8 / each; ++part) {
    const Loaded<T> loaded = reinterpret_cast<const Loaded<T>*>(from)[part];
    UNROLL
    for (int e = 0; e < each; ++e) to[part * each + e] = float(loaded.numbers[e]);
  }
}
