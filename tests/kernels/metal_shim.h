// What Metal's compiler knows, for a C++ compiler that only looks at the text. Clang also keeps the
// address spaces apart, as Metal does.
typedef __SIZE_TYPE__ size_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT32_TYPE__ int32_t;

#ifdef __clang__
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
#endif
#define thread
typedef unsigned int uint;
typedef unsigned short ushort;
struct uint3 {
  uint x, y, z;
};
#ifdef __clang__
typedef _Float16 float16_t;
typedef __bf16 bfloat16_t;
#define half _Float16
#define bfloat __bf16
#else
typedef float float16_t, bfloat16_t;
#define half float
#define bfloat float
#endif
// Words of Metal's that name nothing else there, as `float` and `inline` do not in C++.
#define kernel inline
#define vertex inline
#define fragment inline

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
template <class N>
N simd_shuffle_xor(N, ushort);
float exp2(float);
float max(float, float);
}  // namespace metal
using namespace metal;
