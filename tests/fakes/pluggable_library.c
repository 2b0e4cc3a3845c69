/* The library of test_pluggable.py: host memory behind the two functions of the CUDA semantics. */
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

ssize_t live_count, live_bytes, limit_bytes = 1 << 30;
ssize_t wrong_frees;
int last_device = -1;
void* last_stream;

void* test_allocate(ssize_t size, int device, void* stream) {
  void* pointer = 0;
  if (size > limit_bytes - live_bytes || posix_memalign(&pointer, 512, size)) return 0;
  live_count += 1;
  live_bytes += size;
  last_device = device;
  last_stream = stream;
  return pointer;
}

void test_free(void* pointer, ssize_t size, int device, void* stream) {
  if (!pointer || device != last_device || stream != last_stream) wrong_frees += 1;
  live_count -= 1;
  live_bytes -= size;
  free(pointer);
}
