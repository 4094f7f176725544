#include "tf_c_api.h"

#include <dlfcn.h>

namespace nanotf {
namespace {

TfApi api;

// `RTLD_NOLOAD`: use only the library that `import tensorflow` has loaded, never a second copy.
void* Framework() {
  static const char* const kNames[] = {"libtensorflow_framework.so.2",
                                       "libtensorflow_framework.2.dylib"};
  for (const char* name : kNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  return RTLD_DEFAULT;
}

}  // namespace

const char* LoadTfApi() {
  void* library = Framework();
#define X(result, name, parameters)                                               \
  api.name = reinterpret_cast<result(*) parameters>(dlsym(library, "TF_" #name)); \
  if (api.name == nullptr) return "TF_" #name;
  NANOTF_TF_FUNCTIONS(X)
#undef X
  return "";
}

const TfApi& tf() { return api; }

}  // namespace nanotf
