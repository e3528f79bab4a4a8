// flash_ext._plan: the planner as Python sees it. explain() and supports() print it, tests check it without a device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backward_schedule.h"
#include "kernels/common/backward/order.h"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/scheduler/work_order.h"
#include "names.h"
#include "plan.h"
#include "problem_text.h"
#include "splits.h"

namespace py = pybind11;
using namespace flash_ext;
using namespace flash_ext::plan;

namespace {

/// A field of an enum type is a string in Python.
template <class Value>
void bind_field(py::class_<Problem>& binding, const char* name, Value Problem::*field, const char* meaning) {
  if constexpr (std::is_enum_v<Value>) {
    binding.def_property(
        name, [field](const Problem& p) { return name_of(p.*field); },
        [field, name](Problem& p, const std::string& text) { p.*field = value_of<Value>(name, text); }, meaning);
  } else {
    binding.def_readwrite(name, field, meaning);
  }
}

Problem problem_from(const py::kwargs& fields) {
  Problem problem;
  const py::object view = py::cast(&problem, py::return_value_policy::reference);
  for (const auto& [name, value] : fields) py::setattr(view, name, value);
  return problem;
}

void bind_problem(py::module_& m) {
  py::class_<Problem> problem(m, "Problem",
                              "One call: shapes, options, device. Problem(**fields) sets the fields that are named.");
  problem.def(py::init(&problem_from));
  for_each_field([&](const char* name, auto field, const char* meaning) { bind_field(problem, name, field, meaning); });
  problem.def("__str__", &text_of, "A line for each field.");
  m.def("problem_of", &problem_of, py::arg("text"), "The problem that an operator describes, or str(problem).");
}

void bind_plan(py::module_& m) {
  py::class_<KeyTileSchedule>(m, "KeyTileSchedule", "How CTAs of the backward on CUDA take tiles of keys.")
      .def_readonly("section_heads", &KeyTileSchedule::section_heads, "key heads whose tiles stand side by side")
      .def_readonly("head_splits", &KeyTileSchedule::head_splits, "of a tile, along the heads of a group")
      .def_readonly("query_splits", &KeyTileSchedule::query_splits, "of each of these, along the queries, at most")
      .def_readonly("unsplit_tiles", &KeyTileSchedule::unsplit_tiles, "from the first on, that are not split");
  py::class_<KeySplits>(m, "KeySplits", "How the forward on Hopper splits the keys of its last query tiles over CTAs.")
      .def_readonly("first_tile", &KeySplits::first_tile, "query tiles of the order before those that are split")
      .def_readonly("tiles", &KeySplits::tiles, "that are split; 0: none")
      .def_readonly("unsplit_after", &KeySplits::unsplit_after, "tiles that follow these, and are not split")
      .def_readonly("long_splits", &KeySplits::long_splits, "of each tile, of its last keys")
      .def_readonly("short_splits", &KeySplits::short_splits, "of each tile, of its first keys")
      .def_property_readonly("short_share",
                             [](const KeySplits& s) { return static_cast<double>(s.short_share) / s.kWholeShare; });
  py::class_<Plan>(m, "Plan", "How a problem runs, and why.")
      .def_property_readonly(
          "kernel", [](const Plan& plan) { return kernel_name(plan.kernel); }, "path below csrc/kernels")
      .def_property_readonly(
          "bias_kernel", [](const Plan& plan) { return kernel_name(plan.bias_kernel); },
          "CUDA, backward: the same of the gradient of bias")
      .def_readonly("bias_stages", &Plan::bias_stages,
                    "of bias_kernel for all GPUs: stages of slabs; 0 where shared memory is not known")
      .def_readonly("bias_kernel_stages_bias", &Plan::bias_kernel_stages_bias,
                    "of bias_kernel for all GPUs: tiles of bias come to shared memory")
      .def_readonly("variant", &Plan::variant, "of the kernel, where it has several: the options that it has code for")
      .def_property_readonly("mask_class", [](const Plan& plan) { return name_of(plan.mask_class); })
      .def_readonly("block_m", &Plan::block_m, "query rows per tile, those of a head group together")
      .def_readonly("block_n", &Plan::block_n, "keys per tile; 0, and 0 rows: as the kernel's own configuration has it")
      .def_readonly("head_group", &Plan::head_group, "heads with the same key head whose rows share a tile")
      .def_readonly("num_splits", &Plan::num_splits, "key ranges whose results are merged")
      .def_readonly("split_size", &Plan::split_size, "keys per range where that is fixed, else 0")
      .def_readonly("min_split_size", &Plan::min_split_size,
                    "decode on CUDA: fewest keys of a range, where they have equal sizes, else 0")
      .def_readonly("split_ctas", &Plan::split_ctas,
                    "decode on CUDA: CTAs that share the ranges of a tile, where split_size is fixed, else 0")
      .def_readonly("section_heads", &Plan::section_heads,
                    "forward on CUDA: heads side by side in the order of tiles; 0 where a list orders them")
      .def_readonly("section_batches", &Plan::section_batches,
                    "forward for all GPUs: batch entries side by side, whose bias is the same")
      .def_readonly("stages_bias", &Plan::stages_bias,
                    "forward for all GPUs: tiles of bias come to shared memory ahead of time")
      .def_readonly("fuses_max_logit", &Plan::fuses_max_logit,
                    "forward on CUDA: the kernel computes max_logit itself, else another one does")
      .def_readonly("num_chunks", &Plan::num_chunks, "backward: key ranges per head worked on independently")
      .def_readonly("schedule", &Plan::schedule, "backward on CUDA: the order of tiles of keys, and how they are split")
      .def_readonly("key_splits", &Plan::key_splits, "forward on Hopper: tiles whose keys several CTAs share")
      .def_readonly("reasons", &Plan::reasons);

  m.def(
      "make_plan", [](const Problem& problem) { return make_plan(problem, true); }, py::arg("problem"),
      "The plan of a problem, the same that its operator follows.\n\nRaises ValueError where supports() says no.");
  m.def(
      "supports",
      [](const Problem& problem) {
        const Support support = supports(problem);
        return std::pair(support.ok, support.reason);
      },
      py::arg("problem"), "(True, '') or (False, reason); operators raise with the same reason.");
  m.def("choose_num_splits", &choose_num_splits, py::arg("work_items"), py::arg("num_workers"), py::arg("seqlen_k"),
        "Into how many key ranges decoding is split so that work_items items keep num_workers workers busy.");
}

std::vector<TileRange> key_tiles(int64_t seqlen_q, int64_t seqlen_k, std::pair<int64_t, int64_t> window_size,
                                 bool top_left, int64_t block_m, int64_t block_n) {
  if (seqlen_q < 0 || seqlen_k < 0 || block_m < 1 || block_n < 1) {
    throw py::value_error("key_tiles: sequence lengths must be >= 0 and blocks >= 1");
  }
  const Window window = make_window(window_size.first, window_size.second, top_left, seqlen_q, seqlen_k);
  std::vector<TileRange> tiles;
  for (int64_t i = 0; i < seqlen_q; i += block_m) {
    tiles.push_back(tile_range(i, std::min(i + block_m, seqlen_q), seqlen_k, window, block_n));
  }
  return tiles;
}

void bind_tiles(py::module_& m) {
  py::class_<TileRange>(
      m, "TileRange",
      "The key tiles [begin, end) that a tile of queries visits; [full_begin, full_end) of them need\n"
      "no mask, the others are partial.")
      .def_readonly("begin", &TileRange::begin)
      .def_readonly("end", &TileRange::end)
      .def_readonly("full_begin", &TileRange::full_begin)
      .def_readonly("full_end", &TileRange::full_end);
  m.def("key_tiles", &key_tiles, py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("window_size") = std::pair(-1, -1),
        py::arg("top_left") = false, py::arg("block_m") = 64, py::arg("block_n") = 64,
        "One TileRange per tile of block_m queries, by the rule\n"
        "i + offset - left <= j <= i + offset + right with offset = seqlen_k - seqlen_q, or 0 when top_left.");
}

using BackwardCtaTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double>;

std::vector<BackwardCtaTuple> ctas_of_backward(const Problem& problem) {
  const Plan plan = make_plan(problem, false);
  if (problem.device != Device::kCuda || problem.operation != Operation::kBackward)
    throw py::value_error("backward_ctas: expected operation backward on cuda");
  std::vector<BackwardCtaTuple> ctas;
  const auto tiles_of = row_of(plan.kernel).backward_tiles;
  if (!tiles_of)
    throw py::value_error("backward_ctas: " + std::string(kernel_name(plan.kernel)) + " has no tiles of keys");
  const BackwardTiles tiles = tiles_of(problem);
  for (const BackwardCta& cta : backward_ctas(problem, tiles, plan.schedule))
    ctas.emplace_back(cta.batch, cta.first_head, cta.heads, cta.key_tile, cta.begin, cta.end, cta.cycles);
  return ctas;
}

/// The key tile of each position, and the one whose share of dQ's sums it zeroes: (key head, tile, key head, tile).
using ZeroingTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;
std::vector<ZeroingTuple> dq_zeroing(int64_t heads, int64_t key_tiles, int64_t section_heads, int64_t at_once,
                                     int64_t reserved) {
  if (std::min({heads, key_tiles, section_heads, at_once}) < 1 || reserved < 0)
    throw py::value_error("dq_zeroing: expected reserved >= 0, and at least 1 of all others");
  const BackwardOrder order = backward_order(1, heads, heads, key_tiles, 1, KeyTileSchedule{section_heads}, false);
  const DqZeroingOrder zeroing = dq_zeroing_order(order, at_once, reserved);
  std::vector<ZeroingTuple> positions;
  for (uint32_t position = 0; position < order.heads * order.key_tiles; ++position) {
    const KeyWorkTile tile = order.tile_at(position);
    KeyWorkTile zeroed{0, -1, -1};
    if (zeroing.is_used() && !zeroing.is_past(zeroing.target(position))) {
      const KeyWorkTile target = order.tile_at(zeroing.target(position));
      if (zeroing.covers(zeroing.key_head(target.batch, target.head_kv))) zeroed = target;
    }
    positions.emplace_back(tile.head_kv, tile.tile, zeroed.head_kv, zeroed.tile);
  }
  return positions;
}

void bind_backward_schedule(py::module_& m) {
  m.def("dq_zeroing", &dq_zeroing, py::arg("heads"), py::arg("key_tiles"), py::arg("section_heads"), py::arg("at_once"),
        py::arg("reserved"),
        "For each position of an unsplit dense backward on CUDA: its key head and tile, and those whose share of dQ's\n"
        "sums it zeroes, or -1 and -1. at_once: positions that run at the same time; reserved: the first positions,\n"
        "which zero nothing.");
  m.def("backward_ctas", &ctas_of_backward, py::arg("problem"),
        "What the CTAs of the backward of a dense problem on CUDA, or clusters of them, go over, in their order:\n"
        "(batch, first query head, heads, tile of keys, first tile of queries, end of these, cycles as planned).");
}

std::vector<std::tuple<int32_t, int32_t, int32_t>> work_list(const std::vector<int64_t>& rows,
                                                             const std::vector<int64_t>& other_rows, int block,
                                                             int heads, int head_group, bool last_tile_first,
                                                             int64_t rows_in_l2, int64_t section_part) {
  if (rows.size() != other_rows.size() || block < 64 || heads < 1 || head_group < 1 || heads % head_group != 0 ||
      rows_in_l2 < 1 || section_part < 1) {
    throw py::value_error(
        "work_list: rows and other_rows must be as many, block >= 64, and head_group must divide heads");
  }
  const WorkOrder order = work_order(block, heads, head_group, last_tile_first, rows_in_l2, section_part);
  std::vector<std::tuple<int32_t, int32_t, int32_t>> work_tiles;
  for (const ListedTile& entry : list_tiles(order, rows, other_rows))
    for (int head = 0; head < order.bundle_heads; ++head)
      work_tiles.emplace_back(entry.sequence, entry.first_head + head, entry.tile);
  return work_tiles;
}

void bind_work_list(py::module_& m) {
  m.def(
      "work_list", &work_list, py::arg("rows"), py::arg("other_rows"), py::arg("block") = 128, py::arg("heads") = 1,
      py::arg("head_group") = 1, py::arg("last_tile_first") = false, py::arg("rows_in_l2") = 1,
      py::arg("section_part") = 1,
      "The work tiles (sequence, head, tile) of packed sequences in the order in which CTAs acquire them:\n"
      "rows of the side that is divided into tiles of `block` rows, other_rows of the other side. rows_in_l2: of the\n"
      "other side, for a head group, that fit into L2; head_group: heads that share them; section_part: a section of\n"
      "several sequences has one in so many of them.");
  m.def("most_tiles", &most_tiles, py::arg("batch"), py::arg("longest"), py::arg("rows"), py::arg("block"),
        "A bound on the tiles of packed sequences of `rows` rows in all, each of `longest` rows at most.");
  m.def("lists_tiles", &lists_tiles, py::arg("batch"), py::arg("longest"), py::arg("rows"), py::arg("block"),
        py::arg("heads"),
        "Whether CUDA kernels list the tiles of packed sequences, instead of a grid of all there can be.");
}

// ---- Exceptions of Python that pass through C++ ---------------------------------------------------------------------

/// Throws the exception at that address, which it owns, for torch's bindings to raise in Python again.
[[noreturn]] void throw_exception(int64_t address) {
  const py::gil_scoped_acquire gil;
  auto error = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(address));
  PyObject* const type = py::type::handle_of(error).inc_ref().ptr();
  PyObject* const trace = PyException_GetTraceback(error.ptr());
  PyErr_Restore(type, error.release().ptr(), trace);  // PyErr_SetObject would replace its context by the caller's
  throw py::error_already_set();
}

/// The exception as numbers, for libraries that have no Python in them: a function to call, and its argument. torch's
/// bindings catch the class of their own pybind11, by its name. Its members are the same in 3.0, which torch 2.10 to
/// 2.15 bring, and 3.1: pyproject.toml allows no other, and CI tests the oldest and the newest torch.
std::pair<int64_t, int64_t> thrower_of(const py::object& error) {
  static_assert(PYBIND11_VERSION_MAJOR == 3 && PYBIND11_VERSION_MINOR <= 1, "torch's pybind11 has other exceptions");
  return {reinterpret_cast<int64_t>(&throw_exception), reinterpret_cast<int64_t>(error.inc_ref().ptr())};
}

void bind_architectures(py::module_& m) {
  py::class_<Architecture>(m, "Architecture", "GPUs with kernels that run on no others.")
      .def_readonly("family", &Architecture::family, "of GPUs: 'Hopper'")
      .def_readonly("compute_capability", &Architecture::compute_capability, "90 for sm_90")
      .def_readonly("target", &Architecture::target, "as FLASH_EXT_ARCHS names it: '90a'")
      .def_readonly("environment", &Architecture::environment, "the variable that turns the kernels off");
  m.attr("SPECIAL_ARCHITECTURES") = py::tuple(py::cast(special_architectures()));
}

void bind_exceptions(py::module_& m) {
  m.def("thrower_of", &thrower_of, py::arg("error"),
        "(function, argument), addresses: void function(int64_t argument) throws the exception in C++. To be called\n"
        "once.");
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.doc() = "Problem -> Plan: which kernel runs, on which tiles, in how many splits, and why.";
  bind_problem(m);
  bind_plan(m);
  bind_tiles(m);
  bind_work_list(m);
  bind_backward_schedule(m);
  bind_architectures(m);
  bind_exceptions(m);
  m.attr("KERNELS") = py::tuple(py::cast(kernel_names()));
  m.attr("MAX_CUDA_BATCH") = kMaxCudaBatch;
  m.attr("MAX_CUDA_SEQLEN_Q") = kMaxCudaSeqlenQ;
  m.attr("MAX_CUDA_SEQLEN_K") = kMaxCudaSeqlenK;
  m.attr("CPU_MIN_SPLIT_SIZE") = kCpuMinSplitSize;
  m.attr("CPU_MAX_SPLITS") = kCpuMaxSplits;
  m.attr("BATCH_INVARIANT_SPLIT_SIZE") = kBatchInvariantSplitSize;
}
