// Macros of body.h for Metal. The kernel itself contains the names of grid variables, because MLX
// looks for them there.
#define FN inline
#define DEVICE device
#define THREAD thread
#define VF float
#define VI int
#define VB bool
#define UNROLL _Pragma("clang loop unroll(full)")
#define XOR_SHUFFLE(x, m) metal::simd_shuffle_xor(x, ushort(m))
#define EXP2(x) metal::exp2(x)
#define MAX(a, b) metal::max(a, b)
#define SELECT(c, a, b) ((c) ? (a) : (b))
#define BARRIER metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define ACROSS(type, name, n) thread type name[n]
#define MY(name) name
#define FOR_SIMDGROUPS
#define FOR_LANES(l) for (int l = LANE, once_ = 1; once_; once_ = 0)
#define SHARED(type, name, n) threadgroup type name[n]
#define SHARED_POINTER(type) threadgroup const type*
#define GROUP_X group_.x
#define GROUP_Y group_.y
#define GROUP_Z group_.z
#define SIMDGROUP simdgroup_
#define LANE lane_
