// TensorFlow ops for the collectives of shm.h: NanotfAllReduce, NanotfReduceScatter,
// NanotfGatherParts, NanotfUpdateRows, NanotfAllGather, NanotfBroadcast, NanotfBarrier. NanotfStamp
// only reads the clock.
//
// They are stateful: TensorFlow then does not drop, merge or precompute them, and keeps them in
// tf.function's order of tracing. NanotfSum, an all-reduce, and NanotfJoin, an all-gather, are
// stateless: a graph that does not read their results drops them (collectives/lazy.py keeps the
// others in order). TensorFlow would precompute stateless ops with constant inputs. So these have
// another input, which is never constant and which nothing reads. Kernels block the thread that
// runs them.

#include <stdio.h>
#include <string.h>

#include <memory>
#include <string>
#include <vector>

#include "shm.h"
#include "tf_c_api.h"

namespace nanotf {
namespace {

struct TypeInfo {
  TF_DataType type;
  const char* name;
  size_t bytes;
  int reducible;  // NanotfType, or -1
};

constexpr TypeInfo kTypes[] = {
    {1, "float32", 4, kNanotfFloat32},
    {2, "float64", 8, kNanotfFloat64},
    {3, "int32", 4, kNanotfInt32},
    {4, "uint8", 1, -1},
    {5, "int16", 2, -1},
    {6, "int8", 1, -1},
    {8, "complex64", 8, -1},
    {9, "int64", 8, kNanotfInt64},
    {10, "bool", 1, -1},
    {14, "bfloat16", 2, kNanotfBfloat16},
    {17, "uint16", 2, -1},
    {18, "complex128", 16, -1},
    {19, "float16", 2, kNanotfFloat16},
    {22, "uint32", 4, -1},
    {23, "uint64", 8, -1},
};
constexpr char kReducible[] = "T: {half, bfloat16, float, double, int32, int64}";
constexpr char kMovable[] =
    "T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32, "
    "uint64, bool, complex64, complex128}";

const TypeInfo& InfoOf(TF_DataType type) {
  for (const TypeInfo& info : kTypes) {
    if (info.type == type) return info;
  }
  return kTypes[0];  // the op's definition allows no other
}

struct TensorDeleter {
  void operator()(TF_Tensor* tensor) const { tf().DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, TensorDeleter>;

struct StatusDeleter {
  void operator()(TF_Status* status) const { tf().DeleteStatus(status); }
};
using Status = std::unique_ptr<TF_Status, StatusDeleter>;

Status NewStatus() { return Status(tf().NewStatus()); }
bool Ok(const Status& status) { return tf().GetCode(status.get()) == kTfOk; }

std::vector<int64_t> Dims(const TF_Tensor* tensor) {
  std::vector<int64_t> dims(tf().NumDims(tensor));
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = tf().Dim(tensor, static_cast<int>(i));
  return dims;
}

// The description of a call; see NanotfCall. Outlives the call.
class Description {
 public:
  explicit Description(std::string name) : name_(std::move(name)) {}

  void Add(const TypeInfo& info, const std::vector<int64_t>& dims) {
    type_ = info.name;
    shapes_.push_back(static_cast<int64_t>(dims.size()));
    shapes_.insert(shapes_.end(), dims.begin(), dims.end());
    ++tensors_;
  }

  NanotfCall Call(int64_t key) const {
    return {static_cast<uint32_t>(key), name_.c_str(), type_, shapes_.data(), tensors_, 0, 0};
  }

 private:
  const std::string name_;
  const char* type_ = "";
  std::vector<int64_t> shapes_;
  int64_t tensors_ = 0;
};

// The attributes of an op; one per kernel.
struct Attributes {
  int64_t group = 0;
  int64_t key = 0;
  int64_t root = 0;
  int64_t length = 0;
  int64_t place = 0;
  NanotfReduction reduction = kNanotfSum;
};

std::string ReductionName(NanotfReduction reduction) {
  return reduction == kNanotfSum ? "sum" : reduction == kNanotfMin ? "min" : "max";
}

enum Extra { kNoExtra, kRoot, kLength, kPlace, kReduction };

template <Extra kExtra>
void* CreateKernel(TF_OpKernelConstruction* construction) {
  auto* attributes = new Attributes;
  const Status status = NewStatus();
  auto get = [&](const char* name, int64_t* value) {
    if (Ok(status)) tf().OpKernelConstruction_GetAttrInt64(construction, name, value, status.get());
  };
  get("group", &attributes->group);
  get("key", &attributes->key);
  if (kExtra == kRoot) get("root", &attributes->root);
  if (kExtra == kLength) get("length", &attributes->length);
  if (kExtra == kPlace) get("place", &attributes->place);
  if (kExtra == kReduction && Ok(status)) {
    char name[8] = {};
    tf().OpKernelConstruction_GetAttrString(construction, "reduction", name, 3, status.get());
    attributes->reduction = strcmp(name, "min") == 0   ? kNanotfMin
                            : strcmp(name, "max") == 0 ? kNanotfMax
                                                       : kNanotfSum;
  }
  if (!Ok(status)) tf().OpKernelConstruction_Failure(construction, status.get());
  return attributes;
}

void DeleteKernel(void* kernel) { delete static_cast<Attributes*>(kernel); }

// One execution of a kernel: its inputs, its outputs and the first error.
class Execution {
 public:
  explicit Execution(TF_OpKernelContext* context) : context_(context), status_(NewStatus()) {}
  ~Execution() {
    if (!Ok(status_)) tf().OpKernelContext_Failure(context_, status_.get());
  }

  bool ok() const { return Ok(status_); }
  NanotfFailure* failure() { return &failure_; }
  void Fail(const char* message) { tf().SetStatus(status_.get(), kTfInternal, message); }
  // TensorFlow carries only a text. For the rest, callers ask nanotf_failures.
  void Check(int failed) {
    if (failed == 0) return;
    std::string message = std::string("nanotf collective: ") + failure_.text;
    if (failure_.remedy[0] != 0) message += std::string(". ") + failure_.remedy;
    Fail(message.c_str());
  }

  Tensor Input(int index) {
    TF_Tensor* tensor = nullptr;
    tf().GetInput(context_, index, &tensor, status_.get());
    return Tensor(tensor);
  }
  Tensor Output(int index, const Tensor& like, const std::vector<int64_t>& dims) {
    size_t elements = 1;
    for (const int64_t dim : dims) elements *= static_cast<size_t>(dim);
    return Tensor(tf().AllocateOutput(context_, index, tf().TensorType(like.get()), dims.data(),
                                      static_cast<int>(dims.size()), elements, status_.get()));
  }
  // Reuses the memory of an input of the same type if nothing else needs it, else allocates.
  Tensor OutputInPlace(int input, int index, const std::vector<int64_t>& dims) {
    int forwarded = -1;
    return Tensor(tf().ForwardInputOrAllocateOutput(context_, &input, 1, index, dims.data(),
                                                    static_cast<int>(dims.size()), &forwarded,
                                                    status_.get()));
  }
  void SetOutput(int index, const Tensor& tensor) {
    tf().SetOutput(context_, index, tensor.get(), status_.get());
  }

 private:
  TF_OpKernelContext* context_;
  Status status_;
  NanotfFailure failure_ = {};
};

// kUnread is the number of inputs after the tensors.
template <int kUnread>
void ComputeAllReduce(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  Description description("all_reduce(" + ReductionName(attributes.reduction) + ")");
  const int count = tf().NumInputs(context) - kUnread;
  std::vector<Tensor> outputs(count);
  std::vector<NanotfFragment> fragments(count);
  int type = kNanotfFloat32;
  for (int i = 0; i < count; ++i) {
    const Tensor input = run.Input(i);
    if (!run.ok()) return;
    const std::vector<int64_t> dims = Dims(input.get());
    const TypeInfo& info = InfoOf(tf().TensorType(input.get()));
    type = info.reducible;
    description.Add(info, dims);
    fragments[i].in = tf().TensorData(input.get());
    fragments[i].bytes = tf().TensorByteSize(input.get());
  }
  for (int i = 0; i < count; ++i) {
    // Fetched again: holding the input all along would prevent reuse of its memory.
    std::vector<int64_t> dims;
    {
      const Tensor input = run.Input(i);
      dims = Dims(input.get());
    }
    outputs[i] = run.OutputInPlace(i, i, dims);
    if (!run.ok()) return;
    fragments[i].out = tf().TensorData(outputs[i].get());
  }
  const NanotfCall call = description.Call(attributes.key);
  run.Check(nanotf_all_reduce(attributes.group, &call, static_cast<NanotfType>(type),
                              attributes.reduction, fragments.data(), count, run.failure()));
}

struct GatherOutput {
  Execution* run;
  const Tensor* input;
  std::vector<int64_t> dims;
  Tensor tensor;
};

int AllocateGathered(void* context, uint64_t rows, void** out) {
  auto* output = static_cast<GatherOutput*>(context);
  output->dims[0] = static_cast<int64_t>(rows);
  output->tensor = output->run->Output(0, *output->input, output->dims);
  if (!output->run->ok()) return 1;
  *out = tf().TensorData(output->tensor.get());
  return 0;
}

void ComputeAllGather(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  const Tensor input = run.Input(0);
  if (!run.ok()) return;
  GatherOutput output{&run, &input, Dims(input.get()), nullptr};
  if (output.dims.empty()) {
    return run.Fail(
        "nanotf collective: all_gather needs a tensor with at least one dimension. "
        "Received: a scalar. Reshape it to [1].");
  }
  const TypeInfo& info = InfoOf(tf().TensorType(input.get()));
  Description description("all_gather");
  const uint64_t rows = static_cast<uint64_t>(output.dims[0]);
  output.dims[0] = -1;
  description.Add(info, output.dims);
  uint64_t row_bytes = info.bytes;
  for (size_t i = 1; i < output.dims.size(); ++i) row_bytes *= output.dims[i];
  const NanotfCall call = description.Call(attributes.key);
  run.Check(nanotf_all_gather(attributes.group, &call, tf().TensorData(input.get()), rows,
                              row_bytes, AllocateGathered, &output, run.failure()));
}

// Sums tensors, treated as one vector, over the ranks; this rank gets its part.
void ComputeReduceScatter(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  Description description("reduce_scatter");
  const int count = tf().NumInputs(context);
  std::vector<Tensor> inputs;
  std::vector<NanotfFragment> fragments(count);
  int type = kNanotfFloat32;
  for (int i = 0; i < count; ++i) {
    inputs.push_back(run.Input(i));
    if (!run.ok()) return;
    const TypeInfo& info = InfoOf(tf().TensorType(inputs[i].get()));
    type = info.reducible;
    description.Add(info, Dims(inputs[i].get()));
    fragments[i] = {tf().TensorData(inputs[i].get()), nullptr,
                    tf().TensorByteSize(inputs[i].get())};
  }
  const Tensor part = run.Output(0, inputs[0], {attributes.length});
  if (!run.ok()) return;
  const NanotfCall call = description.Call(attributes.key);
  run.Check(nanotf_reduce_scatter(attributes.group, &call, static_cast<NanotfType>(type),
                                  fragments.data(), count, tf().TensorData(part.get()),
                                  tf().TensorByteSize(part.get()), run.failure()));
}

// Returns a tensor in memory that all ranks share, for as long as it is held.
Tensor SharedTensor(const TypeInfo& info, const std::vector<int64_t>& dims,
                    const NanotfFragment& values, void* hold) {
  return Tensor(tf().NewTensor(
      info.type, dims.data(), static_cast<int>(dims.size()), values.out, values.bytes,
      [](void*, size_t, void* held) { nanotf_release(held); }, hold));
}

// Makes the outputs of ComputeGatherParts in memory that all ranks share; returns false if they
// cannot be, or after an error.
bool GatherShared(Execution* run, const Attributes& attributes, const Description& description,
                  const Tensor& part, uint64_t element_bytes,
                  const std::vector<std::vector<int64_t>>& dims) {
  const TypeInfo& info = InfoOf(tf().TensorType(part.get()));
  std::vector<NanotfFragment> fragments;
  for (const std::vector<int64_t>& shape : dims) {
    uint64_t bytes = info.bytes;
    for (const int64_t dim : shape) bytes *= static_cast<uint64_t>(dim);
    fragments.push_back({nullptr, nullptr, bytes});
  }
  std::vector<void*> holds(fragments.size(), nullptr);
  const int64_t count = static_cast<int64_t>(fragments.size());
  const NanotfCall call = description.Call(attributes.key);
  int shared = 0;
  run->Check(nanotf_gather_shared(attributes.group, &call, attributes.place,
                                  tf().TensorData(part.get()), tf().TensorByteSize(part.get()),
                                  element_bytes, fragments.data(), count, holds.data(), &shared,
                                  run->failure()));
  if (!run->ok() || !shared) return false;
  for (size_t i = 0; i < fragments.size(); ++i) {
    run->SetOutput(static_cast<int>(i), SharedTensor(info, dims[i], fragments[i], holds[i]));
  }
  return true;
}

// Reverses ComputeReduceScatter: tensors of the shapes of inputs 1 to N, from all parts (input 0),
// which have elements or, with more dimensions than one, rows.
void ComputeGatherParts(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  Description description("gather_parts");
  const Tensor part = run.Input(0);
  if (!run.ok()) return;
  const TypeInfo& info = InfoOf(tf().TensorType(part.get()));
  const int count = tf().NumInputs(context) - 1;
  std::vector<std::vector<int64_t>> dims;
  for (int i = 0; i < count; ++i) {
    const Tensor like = run.Input(i + 1);
    if (!run.ok()) return;
    dims.push_back(Dims(like.get()));
    description.Add(info, dims.back());
  }
  uint64_t element_bytes = info.bytes;
  const std::vector<int64_t> rows = Dims(part.get());
  for (size_t i = 1; i < rows.size(); ++i) element_bytes *= static_cast<uint64_t>(rows[i]);
  if (attributes.place != 0 &&
      GatherShared(&run, attributes, description, part, element_bytes, dims)) {
    return;
  }
  if (!run.ok()) return;
  std::vector<Tensor> outputs;
  std::vector<NanotfFragment> fragments(count);
  for (int i = 0; i < count; ++i) {
    // In the memory of the input, which nothing holds any more.
    outputs.push_back(run.OutputInPlace(i + 1, i, dims[i]));
    if (!run.ok()) return;
    fragments[i] = {nullptr, tf().TensorData(outputs[i].get()),
                    tf().TensorByteSize(outputs[i].get())};
  }
  const NanotfCall call = description.Call(attributes.key);
  run.Check(nanotf_gather_parts(attributes.group, &call, tf().TensorData(part.get()),
                                tf().TensorByteSize(part.get()), element_bytes, fragments.data(),
                                count, run.failure()));
}

// Replaces rows (input 1 their indices, 2 their values) of a table (input 0).
void ComputeUpdateRows(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  const Tensor table = run.Input(0);
  if (!run.ok()) return;
  const Tensor indices = run.Input(1);
  if (!run.ok()) return;
  const Tensor values = run.Input(2);
  if (!run.ok()) return;
  const std::vector<int64_t> dims = Dims(table.get());
  const TypeInfo& info = InfoOf(tf().TensorType(table.get()));
  Description description("update_rows");
  description.Add(info, dims);
  uint64_t row_bytes = info.bytes;
  for (size_t i = 1; i < dims.size(); ++i) row_bytes *= static_cast<uint64_t>(dims[i]);
  const uint64_t count = tf().TensorByteSize(indices.get()) / sizeof(int64_t);
  if (dims.empty() || row_bytes == 0 || tf().TensorByteSize(values.get()) != count * row_bytes) {
    return run.Fail(
        "nanotf collective: update_rows needs a table with rows, and a row of values for each "
        "index.");
  }
  const NanotfRows rows = {static_cast<int64_t>(count), row_bytes,
                           static_cast<const int64_t*>(tf().TensorData(indices.get())),
                           tf().TensorData(values.get())};
  const NanotfCall call = description.Call(attributes.key);
  NanotfFragment whole = {tf().TensorData(table.get()), nullptr, tf().TensorByteSize(table.get())};
  if (attributes.place != 0) {
    void* hold = nullptr;
    run.Check(nanotf_update_shared(attributes.group, &call, attributes.place, &rows, &whole, &hold,
                                   run.failure()));
    if (!run.ok()) return;
    if (hold) return run.SetOutput(0, SharedTensor(info, dims, whole, hold));
  }
  const Tensor output = run.Output(0, table, dims);
  if (!run.ok()) return;
  whole.out = tf().TensorData(output.get());
  run.Check(nanotf_update_rows(attributes.group, &call, &rows, &whole, run.failure()));
}

void ComputeBroadcast(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  Tensor input = run.Input(0);
  if (!run.ok()) return;
  const std::vector<int64_t> dims = Dims(input.get());
  Description description("broadcast from rank " + std::to_string(attributes.root));
  description.Add(InfoOf(tf().TensorType(input.get())), dims);
  const NanotfCall call = description.Call(attributes.key);
  const uint64_t bytes = tf().TensorByteSize(input.get());
  if (nanotf_rank(attributes.group) == attributes.root) {
    // The root's output is its input, to avoid a copy.
    run.Check(nanotf_broadcast(attributes.group, &call, static_cast<int>(attributes.root),
                               tf().TensorData(input.get()), nullptr, bytes, run.failure()));
    if (run.ok()) run.SetOutput(0, input);
    return;
  }
  input.reset();
  const Tensor output = run.OutputInPlace(0, 0, dims);
  if (!run.ok()) return;
  run.Check(nanotf_broadcast(attributes.group, &call, static_cast<int>(attributes.root), nullptr,
                             tf().TensorData(output.get()), bytes, run.failure()));
}

void ComputeBarrier(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  Description description("barrier");
  const NanotfCall call = description.Call(attributes.key);
  run.Check(nanotf_barrier(attributes.group, &call, run.failure()));
}

// Marks that the data of a step, one of which is the input, have arrived.
void ComputeStamp(void* kernel, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(kernel);
  Execution run(context);
  run.Check(nanotf_stamp(attributes.group, run.failure()));
}

struct ShapeDeleter {
  void operator()(TF_ShapeHandle* shape) const { tf().DeleteShapeHandle(shape); }
};
using Shape = std::unique_ptr<TF_ShapeHandle, ShapeDeleter>;

// kUnread is the number of inputs after those that have an output each.
template <int kUnread>
void SameShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape(tf().NewShapeHandle());
  const int count = static_cast<int>(tf().ShapeInferenceContextNumInputs(context)) - kUnread;
  for (int i = 0; i < count && tf().GetCode(status) == kTfOk; ++i) {
    tf().ShapeInferenceContextGetInput(context, i, shape.get(), status);
    if (tf().GetCode(status) != kTfOk) return;
    tf().ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

void GatheredShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape input(tf().NewShapeHandle());
  const Shape rest(tf().NewShapeHandle());
  const Shape output(tf().NewShapeHandle());
  auto ok = [&] { return tf().GetCode(status) == kTfOk; };
  tf().ShapeInferenceContextGetInput(context, 0, input.get(), status);
  if (ok() && !tf().ShapeInferenceContextRankKnown(context, input.get())) {
    return tf().ShapeInferenceContextSetUnknownShape(context, status);
  }
  if (ok()) {
    tf().ShapeInferenceContextWithRankAtLeast(context, input.get(), 1, input.get(), status);
  }
  if (ok()) {
    // An end past the rank means the rank.
    tf().ShapeInferenceContextSubshape(context, input.get(), 1, 1 << 20, rest.get(), status);
  }
  if (!ok()) return;
  // TensorFlow writes an unknown dimension as -1; the C API has no other way to make one.
  const Shape rows(
      tf().ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(int64_t{-1})));
  tf().ShapeInferenceContextConcatenateShapes(context, rows.get(), rest.get(), output.get(),
                                              status);
  if (ok()) tf().ShapeInferenceContextSetOutput(context, 0, output.get(), status);
}

// The length is an attribute that the C API cannot read here; group.py sets it.
void SomeVector(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape(
      tf().ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(int64_t{-1})));
  tf().ShapeInferenceContextSetOutput(context, 0, shape.get(), status);
}

void ShapesAfterFirst(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape(tf().NewShapeHandle());
  const int count = static_cast<int>(tf().ShapeInferenceContextNumInputs(context)) - 1;
  for (int i = 0; i < count && tf().GetCode(status) == kTfOk; ++i) {
    tf().ShapeInferenceContextGetInput(context, i + 1, shape.get(), status);
    if (tf().GetCode(status) != kTfOk) return;
    tf().ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

void NoShapes(TF_ShapeInferenceContext*, TF_Status*) {}

struct OpDefinition {
  const char* name;
  std::vector<const char*> attributes;
  std::vector<const char*> inputs;
  const char* output;
  TfShapeFunction shape;
  void* (*create)(TF_OpKernelConstruction*);
  void (*compute)(void*, TF_OpKernelContext*);
  bool stateful = true;
};

void Register(const OpDefinition& op, const Status& status) {
  TF_OpDefinitionBuilder* builder = tf().NewOpDefinitionBuilder(op.name);
  tf().OpDefinitionBuilderAddAttr(builder, "group: int");
  tf().OpDefinitionBuilderAddAttr(builder, "key: int");
  for (const char* attribute : op.attributes) tf().OpDefinitionBuilderAddAttr(builder, attribute);
  for (const char* input : op.inputs) tf().OpDefinitionBuilderAddInput(builder, input);
  if (op.output != nullptr) tf().OpDefinitionBuilderAddOutput(builder, op.output);
  // TensorFlow's function makes an op stateful whatever its argument.
  if (op.stateful) tf().OpDefinitionBuilderSetIsStateful(builder, true);
  tf().OpDefinitionBuilderSetShapeInferenceFunction(builder, op.shape);
  tf().RegisterOpDefinition(builder, status.get());
  if (!Ok(status)) return;
  tf().RegisterKernelBuilder(
      op.name, tf().NewKernelBuilder(op.name, "CPU", op.create, op.compute, DeleteKernel),
      status.get());
}

// Runs when tf.load_op_library opens this file; TensorFlow then collects new ops.
__attribute__((constructor)) void RegisterAll() {
  const char* missing = LoadTfApi();
  if (*missing != 0) {
    fprintf(stderr, "nanotf: TensorFlow's C API lacks %s; no op was registered.\n", missing);
    return;
  }
  const OpDefinition ops[] = {
      {"NanotfAllReduce",
       {"N: int >= 1", kReducible, "reduction: {'sum', 'min', 'max'}"},
       {"tensors: N * T"},
       "reduced: N * T",
       SameShapes<0>,
       CreateKernel<kReduction>,
       ComputeAllReduce<0>},
      {"NanotfSum",
       {"N: int >= 1", kReducible, "reduction: {'sum', 'min', 'max'}"},
       {"tensors: N * T", "moment: int64"},
       "reduced: N * T",
       SameShapes<1>,
       CreateKernel<kReduction>,
       ComputeAllReduce<1>,
       false},
      {"NanotfReduceScatter",
       {"N: int >= 1", kReducible, "length: int"},
       {"tensors: N * T"},
       "part: T",
       SomeVector,
       CreateKernel<kLength>,
       ComputeReduceScatter},
      {"NanotfGatherParts",
       {"N: int >= 1", kReducible, "place: int"},
       {"part: T", "like: N * T"},
       "tensors: N * T",
       ShapesAfterFirst,
       CreateKernel<kPlace>,
       ComputeGatherParts},
      {"NanotfUpdateRows",
       {kMovable, "place: int"},
       {"table: T", "indices: int64", "values: T"},
       "updated: T",
       SameShapes<2>,
       CreateKernel<kPlace>,
       ComputeUpdateRows},
      {"NanotfAllGather",
       {kMovable},
       {"tensor: T"},
       "gathered: T",
       GatheredShape,
       CreateKernel<kNoExtra>,
       ComputeAllGather},
      {"NanotfJoin",
       {kMovable},
       {"tensor: T", "moment: int64"},
       "gathered: T",
       GatheredShape,
       CreateKernel<kNoExtra>,
       ComputeAllGather,
       false},
      {"NanotfBroadcast",
       {kMovable, "root: int"},
       {"tensor: T"},
       "value: T",
       SameShapes<0>,
       CreateKernel<kRoot>,
       ComputeBroadcast},
      {"NanotfBarrier", {}, {}, nullptr, NoShapes, CreateKernel<kNoExtra>, ComputeBarrier},
      {"NanotfStamp",
       {kMovable},
       {"tensor: T"},
       nullptr,
       NoShapes,
       CreateKernel<kNoExtra>,
       ComputeStamp},
  };
  for (const OpDefinition& op : ops) {
    const Status status = NewStatus();
    Register(op, status);
    if (!Ok(status)) {
      fprintf(stderr, "nanotf: %s was not registered: %s\n", op.name, tf().Message(status.get()));
    }
  }
}

}  // namespace
}  // namespace nanotf
