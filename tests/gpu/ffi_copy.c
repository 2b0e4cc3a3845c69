/* Handlers for a GPU that need no compiler of CUDA: they call the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#include "xla/ffi/api/c_api.h"

typedef int (*Copy)(unsigned long long, unsigned long long, size_t, void*);
typedef int (*Wait)(void*);

static int answer_metadata(XLA_FFI_CallFrame* frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata)
    return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  metadata->api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}

static XLA_FFI_Error* fail(const XLA_FFI_Api* api, const char* text) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, text,
                                    XLA_FFI_Error_Code_INTERNAL};
  return api->XLA_FFI_Error_Create(&args);
}

static void* find(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return driver ? dlsym(driver, name) : NULL;
}

static XLA_FFI_Error* find_stream(XLA_FFI_CallFrame* frame, void** stream) {
  XLA_FFI_Stream_Get_Args args = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL, frame->ctx};
  XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&args);
  *stream = args.stream;
  return error;
}

/* A test sets it: from then on the handlers return an error. */
int is_failing = 0;

XLA_FFI_Error* copy_through_scratch(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame)) return NULL;
  if (is_failing) return fail(frame->api, "planted: the handler fails");
  void* stream = NULL;
  XLA_FFI_Error* error = find_stream(frame, &stream);
  if (error) return error;
  XLA_FFI_Buffer* x = frame->args.args[0];
  XLA_FFI_Buffer* y = frame->rets.rets[0];
  size_t size = 4;
  for (int64_t i = 0; i < x->rank; ++i) size *= x->dims[i];
  XLA_FFI_DeviceMemory_Allocate_Args memory = {XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE, NULL,
                                               frame->ctx, size, 16};
  error = frame->api->XLA_FFI_DeviceMemory_Allocate(&memory);
  if (error) return error;
  Copy copy = (Copy)find("cuMemcpyDtoDAsync_v2");
  if (!copy) return fail(frame->api, "no driver");
  typedef unsigned long long Address;
  int failed = copy((Address)memory.data, (Address)x->data, size, stream);
  failed = failed || copy((Address)y->data, (Address)memory.data, size, stream);
  XLA_FFI_DeviceMemory_Free_Args gone = {XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE, NULL,
                                         frame->ctx, size, memory.data};
  error = frame->api->XLA_FFI_DeviceMemory_Free(&gone);
  if (error) return error;
  return failed ? fail(frame->api, "the driver refused a copy") : NULL;
}

XLA_FFI_Error* wait_for_stream(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame)) return NULL;
  XLA_FFI_Error* error = copy_through_scratch(frame);
  void* stream = NULL;
  if (!error) error = find_stream(frame, &stream);
  if (error) return error;
  Wait wait = (Wait)find("cuStreamSynchronize");
  if (!wait || wait(stream)) return fail(frame->api, "the driver refused to wait");
  return NULL;
}
