/* Handlers of XLA's foreign function interface that write down what they are given. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT char report[1 << 16];
EXPORT int deleted_states;
EXPORT void* last_scratch[2];
EXPORT size_t scratch_alignment = 16;
EXPORT int is_failing;
/* What the handler `enqueue` calls instead of enqueueing: (stream, address). */
EXPORT void (*on_enqueue)(void* stream, void* address);

static void say(const char* format, long long a, long long b) {
  size_t used = strlen(report);
  snprintf(report + used, sizeof(report) - used, format, a, b);
}

static void say_text(const char* text, size_t length) {
  size_t used = strlen(report);
  if (used + length + 1 >= sizeof(report)) return;
  memcpy(report + used, text, length);
  report[used + length] = 0;
}

static size_t size_of(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_TOKEN:
      return 0;
    case XLA_FFI_DataType_C128:
      return 16;
    default:
      return 8;
  }
}

static void say_bytes(const void* data, size_t length) {
  for (size_t i = 0; i < length; ++i) say("%02llx", ((const unsigned char*)data)[i], 0);
}

static size_t say_buffer(const XLA_FFI_Buffer* buffer) {
  size_t count = 1;
  say(" size=%lld dtype=%lld", buffer->struct_size, buffer->dtype);
  say(" extension=%lld rank=%lld dims=", buffer->extension_start != NULL, buffer->rank);
  for (int64_t i = 0; i < buffer->rank; ++i) {
    say("%lld,", buffer->dims[i], 0);
    count *= buffer->dims[i];
  }
  return count * size_of(buffer->dtype);
}

static void say_attrs(const XLA_FFI_Attrs* attrs) {
  say("{size=%lld count=%lld ", attrs->struct_size, attrs->size);
  for (int64_t i = 0; i < attrs->size; ++i) {
    say_text(attrs->names[i]->ptr, attrs->names[i]->len);
    say(":%lld=", attrs->types[i], 0);
    void* attr = attrs->attrs[i];
    if (attrs->types[i] == XLA_FFI_AttrType_STRING) {
      XLA_FFI_ByteSpan* span = attr;
      say("%lld ", span->len, 0);
      say_text(span->ptr, span->len);
    } else if (attrs->types[i] == XLA_FFI_AttrType_SCALAR) {
      XLA_FFI_Scalar* scalar = attr;
      say("%lld ", scalar->dtype, 0);
      say_bytes(scalar->value, size_of(scalar->dtype));
    } else if (attrs->types[i] == XLA_FFI_AttrType_ARRAY) {
      XLA_FFI_Array* array = attr;
      say("%lld x %lld ", array->dtype, array->size);
      say_bytes(array->data, array->size * size_of(array->dtype));
    } else {
      say_attrs(attr);
    }
    say_text(" ", 1);
  }
  say_text("}", 1);
}

static void say_frame(const XLA_FFI_CallFrame* frame, int has_data) {
  say("stage=%lld size=%lld", frame->stage, frame->struct_size);
  say(" args=%lld of %lld", frame->args.struct_size, frame->args.size);
  for (int64_t i = 0; i < frame->args.size; ++i) {
    const XLA_FFI_Buffer* buffer = frame->args.args[i];
    say("\n arg kind=%lld", frame->args.types[i], 0);
    size_t length = say_buffer(buffer);
    if (has_data) say_bytes(buffer->data, length);
  }
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    say("\n ret kind=%lld", frame->rets.types[i], 0);
    size_t length = say_buffer(frame->rets.rets[i]);
    if (has_data) memset(((XLA_FFI_Buffer*)frame->rets.rets[i])->data, 7, length);
  }
  say_text("\n ", 2);
  say_attrs(&frame->attrs);
  say_text("\n", 1);
}

static int answer_metadata(XLA_FFI_CallFrame* frame, int minor, XLA_FFI_Handler_Traits traits) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata)
    return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  metadata->api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = minor;
  metadata->traits = traits;
  return 1;
}

static XLA_FFI_Error* make_error(const XLA_FFI_Api* api, const char* text,
                                 XLA_FFI_Error_Code code) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, text, code};
  return api->XLA_FFI_Error_Create(&args);
}

/* The state: one number, counted when it is deleted. */
static void delete_state(void* state) {
  ++deleted_states;
  free(state);
}
EXPORT XLA_FFI_TypeId state_type = {0};
EXPORT XLA_FFI_TypeInfo state_info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, delete_state};

EXPORT XLA_FFI_Error* record_instantiate(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, 0)) return NULL;
  say_frame(frame, 0);
  int* state = malloc(sizeof(int));
  *state = 41;
  XLA_FFI_State_Set_Args args = {XLA_FFI_State_Set_Args_STRUCT_SIZE, NULL, frame->ctx};
  args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  args.type_id = &state_type;
  args.state = state;
  return frame->api->XLA_FFI_State_Set(&args);
}

EXPORT XLA_FFI_Error* record_execute(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, 0)) return NULL;
  say_frame(frame, 1);
  return NULL;
}

EXPORT XLA_FFI_Error* record_with_state(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, 0)) return NULL;
  say_frame(frame, 1);
  XLA_FFI_State_Get_Args args = {XLA_FFI_State_Get_Args_STRUCT_SIZE, NULL, frame->ctx};
  args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  args.type_id = &state_type;
  XLA_FFI_Error* error = frame->api->XLA_FFI_State_Get(&args);
  if (!error) say(" state %lld\n", *(int*)args.state, 0);
  return error;
}

EXPORT XLA_FFI_Error* fail_execute(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, 0)) return NULL;
  return make_error(frame->api, "planted: the matrix is odd",
                    XLA_FFI_Error_Code_FAILED_PRECONDITION);
}

/* Writes sevens into its results, unless it is told to fail. */
EXPORT XLA_FFI_Error* fill_or_fail(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, 0)) return NULL;
  if (is_failing) return fail_execute(frame);
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    XLA_FFI_Buffer* result = frame->rets.rets[i];
    size_t size = size_of(result->dtype);
    for (int64_t d = 0; d < result->rank; ++d) size *= result->dims[d];
    memset(result->data, 7, size);
  }
  return NULL;
}

EXPORT XLA_FFI_Error* newer_execute(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, 99, 0)) return NULL;
  return make_error(frame->api, "was called", XLA_FFI_Error_Code_INTERNAL);
}

static void say_answer(const XLA_FFI_Api* api, const char* name, XLA_FFI_Error* error) {
  say_text(name, strlen(name));
  if (!error) {
    say_text(" ok\n", 4);
    return;
  }
#if XLA_FFI_API_MINOR >= 4
  XLA_FFI_Error_GetDetails_Args details = {XLA_FFI_Error_GetDetails_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_GetDetails(&details);
  say(" error %lld", details.errc, 0);
#else
  XLA_FFI_Error_GetMessage_Args details = {XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_GetMessage(&details);
#endif
  say_text(" ", 1);
  say_text(details.message, strlen(details.message));
  say_text("\n", 1);
  XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&destroy);
}

static void add_one(void* data) { ++*(int*)data; }

EXPORT XLA_FFI_Error* ask_everything(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE))
    return NULL;
  const XLA_FFI_Api* api = frame->api;
  say("table %lld\n", api->struct_size >= XLA_FFI_Api_STRUCT_SIZE, 0);
  XLA_FFI_Stream_Get_Args stream = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL, frame->ctx};
  say_answer(api, "stream", api->XLA_FFI_Stream_Get(&stream));
  say("%llx\n", (long long)stream.stream, 0);
  for (int i = 0; i < 2; ++i) {
    XLA_FFI_DeviceMemory_Allocate_Args memory = {XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE,
                                                 NULL, frame->ctx, 100, scratch_alignment};
    say_answer(api, "allocate", api->XLA_FFI_DeviceMemory_Allocate(&memory));
    last_scratch[i] = memory.data;
    if (memory.data) memset(memory.data, i, 100);
    XLA_FFI_DeviceMemory_Free_Args gone = {XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE, NULL,
                                           frame->ctx, 100, memory.data};
    say_answer(api, "free", api->XLA_FFI_DeviceMemory_Free(&gone));
  }
  int tasks = 0;
  XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL,
                                           frame->ctx, add_one, &tasks};
  say_answer(api, "schedule", api->XLA_FFI_ThreadPool_Schedule(&task));
  int64_t threads = 0;
  XLA_FFI_ThreadPool_NumThreads_Args count = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL,
                                              frame->ctx, &threads};
  say_answer(api, "threads", api->XLA_FFI_ThreadPool_NumThreads(&count));
  say("tasks %lld threads %lld\n", tasks, threads);
  XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx};
  say_answer(api, "run", api->XLA_FFI_RunId_Get(&run));
  XLA_FFI_DeviceOrdinal_Get_Args ordinal = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL,
                                            frame->ctx};
  say_answer(api, "ordinal", api->XLA_FFI_DeviceOrdinal_Get(&ordinal));
  say("%lld\n", ordinal.device_ordinal, 0);
  XLA_FFI_TypeId type = {0};
  XLA_FFI_Type_Register_Args types = {XLA_FFI_Type_Register_Args_STRUCT_SIZE, NULL, {"mine", 4},
                                      &type, &state_info};
  say_answer(api, "type", api->XLA_FFI_Type_Register(&types));
  say("numbered %lld\n", type.type_id != 0, 0);
  XLA_FFI_Handler_Register_Args handler = {XLA_FFI_Handler_Register_Args_STRUCT_SIZE, NULL};
  say_answer(api, "handler", api->XLA_FFI_Handler_Register(&handler));
#if XLA_FFI_API_MINOR >= 4
  XLA_FFI_InvokeContext_FindExtension_Args extension = {
      XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE, NULL, frame->ctx, 1};
  say_answer(api, "extension", api->XLA_FFI_InvokeContext_FindExtension(&extension));
#endif
#if XLA_FFI_API_MINOR >= 5
  XLA_FFI_CustomOptions_Get_Args options = {XLA_FFI_CustomOptions_Get_Args_STRUCT_SIZE, NULL,
                                            frame->ctx};
  say_answer(api, "options", api->XLA_FFI_CustomOptions_Get(&options));
  say_attrs(options.attrs);
#endif
  return NULL;
}

EXPORT XLA_FFI_Error* complete_later(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, 0)) return NULL;
  XLA_FFI_Future_Create_Args made = {XLA_FFI_Future_Create_Args_STRUCT_SIZE};
  XLA_FFI_Error* error = frame->api->XLA_FFI_Future_Create(&made);
  if (error) return error;
  frame->future = made.future;
  if (frame->attrs.size) {
    XLA_FFI_Future_SetError_Args set = {XLA_FFI_Future_SetError_Args_STRUCT_SIZE, NULL, made.future,
                                        make_error(frame->api, "planted later",
                                                   XLA_FFI_Error_Code_ABORTED)};
    return frame->api->XLA_FFI_Future_SetError(&set);
  }
  XLA_FFI_Future_SetAvailable_Args set = {XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, NULL,
                                          made.future};
  return frame->api->XLA_FFI_Future_SetAvailable(&set);
}

/* Stands for a handler of a GPU: takes scratch, and enqueues one piece of work. */
EXPORT XLA_FFI_Error* enqueue(XLA_FFI_CallFrame* frame) {
  if (answer_metadata(frame, XLA_FFI_API_MINOR, 0)) return NULL;
  XLA_FFI_Stream_Get_Args stream = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL, frame->ctx};
  XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&stream);
  XLA_FFI_DeviceMemory_Allocate_Args memory = {XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE, NULL,
                                               frame->ctx, 100, scratch_alignment};
  if (!error) error = frame->api->XLA_FFI_DeviceMemory_Allocate(&memory);
  if (error) return error;
  if (on_enqueue) on_enqueue(stream.stream, ((XLA_FFI_Buffer*)frame->args.args[0])->data);
  last_scratch[0] = memory.data;
  XLA_FFI_DeviceMemory_Free_Args gone = {XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE, NULL,
                                         frame->ctx, 100, memory.data};
  return frame->api->XLA_FFI_DeviceMemory_Free(&gone);
}
