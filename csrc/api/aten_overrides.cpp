#include "aten_overrides.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "aten_attention.h"
#include "python_operators.h"

namespace flash_ext::api {
namespace {

// ---- From torch's stack to a function and back ----------------------------------------------------------------------

/// Takes an argument off torch's stack, in the type in which it is kept until the call.
template <class T>
T take(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

/// Takes an optional tensor. Autograd's formulas give an undefined tensor for an absent one.
template <>
OptionalTensor take<OptionalTensor>(StableIValue value) {
  OptionalTensor tensor = torch::stable::detail::to<OptionalTensor>(value);
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

/// Takes a list of bool as integers: std::vector<bool> has no references to its elements.
template <>
std::vector<int64_t> take<std::vector<int64_t>>(StableIValue value) {
  const std::vector<bool> flags = torch::stable::detail::to<std::vector<bool>>(value);
  return {flags.begin(), flags.end()};
}

template <class T>
StableIValue put_back(const T& value) {
  return torch::stable::detail::from(value);
}

StableIValue put_back(const std::vector<int64_t>& flags) {
  StableListHandle list = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(flags.size(), &list));
  for (const int64_t flag : flags) {
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, torch::stable::detail::from(flag != 0)));
  }
  return torch::stable::detail::from(list);
}

template <class... T, size_t... I>
void put_on_stack(StableIValue* stack, const std::tuple<T...>& values, std::index_sequence<I...>) {
  ((stack[I] = put_back(std::get<I>(values))), ...);
}

template <class... T>
void put_on_stack(StableIValue* stack, const std::tuple<T...>& values) {
  put_on_stack(stack, values, std::index_sequence_for<T...>());
}

template <class Tuple, size_t... I>
Tuple take_tuple(const StableIValue* stack, std::index_sequence<I...>) {
  return {take<std::tuple_element_t<I, Tuple>>(stack[I])...};
}

template <class Tuple>
Tuple take_tuple(const StableIValue* stack) {
  return take_tuple<Tuple>(stack, std::make_index_sequence<std::tuple_size_v<Tuple>>());
}

// ---- Results from Python --------------------------------------------------------------------------------------------

template <class T>
T from_python(StableIValue value) {
  return take<T>(value);
}

template <>
int64_t from_python<int64_t>(StableIValue value) {
  return *static_cast<const int64_t*>(take<Tensor>(value).const_data_ptr());
}

template <class Tuple, size_t... I>
Tuple from_python(const StableIValue* stack, std::index_sequence<I...>) {
  return {from_python<std::tuple_element_t<I, Tuple>>(stack[I])...};
}

template <class Tuple>
Tuple from_python(const StableIValue* stack) {
  return from_python<Tuple>(stack, std::make_index_sequence<std::tuple_size_v<Tuple>>());
}

// ---- The kernels ----------------------------------------------------------------------------------------------------

/// aten's operator, by its name here and in flash_ext_python.
struct Overridden {
  const char* name;
  BoxedKernel kernel;
  std::atomic<int64_t> calls{0};
};

template <auto function>
struct Override;

/// What the dispatcher calls: the function or, where it returns nothing, Python.
template <class Results, class... Parameters, std::optional<Results> (*function)(Parameters...)>
struct Override<function> {
  using Arguments = std::tuple<std::decay_t<Parameters>...>;

  static Overridden entry;

  static void kernel(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
    check(num_arguments == sizeof...(Parameters) && num_results == std::tuple_size_v<Results>, "aten::", entry.name,
          " of this torch has ", num_arguments, " arguments and ", num_results, " results");
    const auto arguments = take_tuple<Arguments>(stack);
    if (const std::optional<Results> results = std::apply(function, arguments)) {
      entry.calls.fetch_add(1, std::memory_order_relaxed);
      return put_on_stack(stack, *results);
    }
    put_on_stack(stack, by_python(arguments));
  }

 private:
  static Results by_python(const Arguments& arguments) {
    static const std::string op = std::string("flash_ext_python::") + entry.name;
    constexpr size_t kNumResults = std::tuple_size_v<Results>;
    StableIValue stack[std::max(sizeof...(Parameters), kNumResults + 1)];
    put_on_stack(stack, arguments);
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op.c_str(), "", stack, TORCH_ABI_VERSION));
    const Results results = from_python<Results>(stack);
    throw_if_any(take<Tensor>(stack[kNumResults]));
    return results;
  }
};

/// What the dispatcher calls where there is no other kernel to go on to.
template <auto function>
struct Implementation;

template <class Results, class... Parameters, Results (*function)(Parameters...)>
struct Implementation<function> {
  static void kernel(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
    check(num_arguments == sizeof...(Parameters) && num_results == std::tuple_size_v<Results>,
          "aten's overrideable attention of this torch has ", num_arguments, " arguments and ", num_results,
          " results");
    put_on_stack(stack, std::apply(function, take_tuple<std::tuple<std::decay_t<Parameters>...>>(stack)));
  }
};

#define FLASH_EXT_OVERRIDE(name, function) \
  template <>                              \
  Overridden Override<&function>::entry{name, &Override<&function>::kernel};

FLASH_EXT_OVERRIDE("_scaled_dot_product_flash_attention", flash_forward)
FLASH_EXT_OVERRIDE("_scaled_dot_product_flash_attention_backward", flash_backward)
FLASH_EXT_OVERRIDE("_scaled_dot_product_flash_attention_for_cpu", cpu_forward)
FLASH_EXT_OVERRIDE("_scaled_dot_product_flash_attention_for_cpu_backward", cpu_backward)
FLASH_EXT_OVERRIDE("_scaled_dot_product_efficient_attention", efficient_forward)
FLASH_EXT_OVERRIDE("_scaled_dot_product_efficient_attention_backward", efficient_backward)
FLASH_EXT_OVERRIDE("_scaled_dot_product_cudnn_attention", cudnn_forward)
FLASH_EXT_OVERRIDE("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)

Overridden& find(const std::string& op) {
  static const std::array<Overridden*, 8> all{
      &Override<&flash_forward>::entry, &Override<&flash_backward>::entry,    &Override<&cpu_forward>::entry,
      &Override<&cpu_backward>::entry,  &Override<&efficient_forward>::entry, &Override<&efficient_backward>::entry,
      &Override<&cudnn_forward>::entry, &Override<&cudnn_backward>::entry};
  for (Overridden* entry : all) {
    if (op == entry->name) return *entry;
  }
  fail("there is no C++ kernel of aten::", op);
}

// ---- In torch's dispatcher ------------------------------------------------------------------------------------------

using Library = torch::stable::detail::StableLibrary;

/// What is overridden now, by dispatch key. An override lasts as long as its library object.
struct Registrations {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Library>> by_key;
};

/// Never destroyed: at the end of a process, torch's dispatcher may be gone first.
Registrations& registrations() {
  static auto* const all = new Registrations;
  return *all;
}

}  // namespace

void register_in_aten(const char* op, const std::string& dispatch_key, BoxedKernel kernel) {
  Registrations& all = registrations();
  const std::lock_guard lock(all.mutex);
  std::unique_ptr<Library>& library = all.by_key[dispatch_key];
  if (!library) {
    library = std::make_unique<Library>(Library::Kind::IMPL, "aten", dispatch_key.c_str(), __FILE__, __LINE__);
  }
  library->impl(op, kernel);
}

void override_aten(std::string op, std::string dispatch_key) {
  const Overridden& entry = find(op);
  register_in_aten(entry.name, dispatch_key, entry.kernel);
}

void restore_aten() {
  Registrations& all = registrations();
  const std::lock_guard lock(all.mutex);
  all.by_key.clear();
}

void fill_fused_attention(std::string dispatch_key) {
  static std::once_flag once;
  std::call_once(once, [&] {
    // Never destroyed: the backward of a graph may run long after its forward.
    auto* const library = new Library(Library::Kind::IMPL, "aten", dispatch_key.c_str(), __FILE__, __LINE__);
    library->impl("_scaled_dot_product_fused_attention_overrideable", &Implementation<&fused_forward>::kernel);
    library->impl("_scaled_dot_product_fused_attention_overrideable_backward",
                  &Implementation<&fused_backward>::kernel);
  });
}

int64_t aten_calls(std::string op) { return find(op).calls.load(std::memory_order_relaxed); }

}  // namespace flash_ext::api
