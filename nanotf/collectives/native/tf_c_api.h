// The part of TensorFlow's C API that ops.cc uses. It is declared here so that builds need no
// TensorFlow headers, and looked up by name at load time so that one binary serves all versions.
// Identical in 2.14 to 2.21: tensorflow/c/{kernels,ops,tf_status,tf_tensor}.h.

#ifndef NANOTF_COLLECTIVES_NATIVE_TF_C_API_H_
#define NANOTF_COLLECTIVES_NATIVE_TF_C_API_H_

#include <stddef.h>
#include <stdint.h>

struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_Status;
struct TF_Tensor;

// Enumerations of the API; their values are part of saved graphs and do not change.
typedef int TF_Code;
constexpr TF_Code kTfOk = 0;
constexpr TF_Code kTfInternal = 13;
typedef int TF_DataType;

using TfShapeFunction = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// X(result, name, parameters)
#define NANOTF_TF_FUNCTIONS(X)                                                                   \
  X(TF_Status*, NewStatus, ())                                                                   \
  X(void, DeleteStatus, (TF_Status*))                                                            \
  X(void, SetStatus, (TF_Status*, TF_Code, const char*))                                         \
  X(TF_Code, GetCode, (const TF_Status*))                                                        \
  X(const char*, Message, (const TF_Status*))                                                    \
  X(TF_Tensor*, NewTensor,                                                                       \
    (TF_DataType, const int64_t*, int, void*, size_t, void (*)(void*, size_t, void*), void*))    \
  X(void, DeleteTensor, (TF_Tensor*))                                                            \
  X(TF_DataType, TensorType, (const TF_Tensor*))                                                 \
  X(int, NumDims, (const TF_Tensor*))                                                            \
  X(int64_t, Dim, (const TF_Tensor*, int))                                                       \
  X(size_t, TensorByteSize, (const TF_Tensor*))                                                  \
  X(void*, TensorData, (const TF_Tensor*))                                                       \
  X(TF_KernelBuilder*, NewKernelBuilder,                                                         \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*),                              \
     void (*)(void*, TF_OpKernelContext*), void (*)(void*)))                                     \
  X(void, RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*))                   \
  X(void, OpKernelConstruction_GetAttrInt64,                                                     \
    (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))                               \
  X(void, OpKernelConstruction_GetAttrString,                                                    \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))                          \
  X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                  \
  X(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                            \
  X(int, NumInputs, (TF_OpKernelContext*))                                                       \
  X(void, GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                         \
  X(void, SetOutput, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                   \
  X(TF_Tensor*, AllocateOutput,                                                                  \
    (TF_OpKernelContext*, int, TF_DataType, const int64_t*, int, size_t, TF_Status*))            \
  X(TF_Tensor*, ForwardInputOrAllocateOutput,                                                    \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))          \
  X(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char*))                              \
  X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                           \
  X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                    \
  X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                   \
  X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                  \
  X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                     \
  X(void, OpDefinitionBuilderSetShapeInferenceFunction,                                          \
    (TF_OpDefinitionBuilder*, TfShapeFunction))                                                  \
  X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                        \
  X(TF_ShapeHandle*, NewShapeHandle, ())                                                         \
  X(void, DeleteShapeHandle, (TF_ShapeHandle*))                                                  \
  X(void, ShapeInferenceContextGetInput,                                                         \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                               \
  X(void, ShapeInferenceContextSetOutput,                                                        \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                               \
  X(int, ShapeInferenceContextRankKnown, (TF_ShapeInferenceContext*, TF_ShapeHandle*))           \
  X(void, ShapeInferenceContextWithRankAtLeast,                                                  \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))          \
  X(void, ShapeInferenceContextSubshape,                                                         \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*)) \
  X(TF_ShapeHandle*, ShapeInferenceContextVectorFromSize, (TF_ShapeInferenceContext*, size_t))   \
  X(void, ShapeInferenceContextConcatenateShapes,                                                \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))  \
  X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))

namespace nanotf {

// tf().NewStatus() calls TF_NewStatus, and so on.
struct TfApi {
#define X(result, name, parameters) result(*name) parameters = nullptr;
  NANOTF_TF_FUNCTIONS(X)
#undef X
};

// Looks up every function in the TensorFlow that this process has loaded. Returns the name of the
// first missing one, "" if none is missing.
const char* LoadTfApi();
const TfApi& tf();

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_TF_C_API_H_
