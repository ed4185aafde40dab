// Reads jobs from standard input, runs each on buffers of just their size, writes its results.
#include <cstdio>
#include <cstdlib>
#include <vector>

static int32_t number() {
  int32_t n;
  if (std::fread(&n, 4, 1, stdin) != 1) std::exit(0);
  return n;
}

int main() {
  for (;;) {
    const int variant = number(), gx = number(), gy = number(), gz = number();
    const int turned = number(), inputs = number(), outputs = number();
    std::vector<void*> buffers;
    std::vector<int> sizes;
    for (int i = 0; i < inputs + outputs; ++i) {
      sizes.push_back(number());
      buffers.push_back(std::malloc(sizes.back()));
      if (i < inputs && std::fread(buffers.back(), 1, sizes.back(), stdin) != size_t(sizes.back())) return 3;
      if (i >= inputs) std::memset(buffers.back(), 0xff, sizes.back());
    }
    const int32_t counted = run(variant, buffers.data(), gx, gy, gz, turned);
    std::fwrite(&counted, 4, 1, stdout);
    for (int i = inputs; i < inputs + outputs; ++i) std::fwrite(buffers[i], 1, sizes[i], stdout);
    std::fflush(stdout);
    for (void* buffer : buffers) std::free(buffer);
  }
}
