// pyscan._C.Writer and the packing functions. A row is handed over with the GIL held, since that is shorter than
// giving it up; whatever may wait gives it up. The writer thread never takes it.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "isa.h"
#include "pack.h"
#include "writer.h"

namespace py = pybind11;

namespace pyscan {
namespace {

using LayoutArgument = std::vector<std::tuple<std::string, std::string, uint64_t>>;

Layout ParseLayout(const LayoutArgument& argument) {
  Layout layout;
  for (const auto& [codec, transform, num_cells] : argument) {
    layout.push_back({ParseCodec(codec.c_str()), ParseTransform(transform.c_str()), num_cells});
  }
  return layout;
}

SyncMode ParseSync(const std::string& name) {
  if (name == "never") return SyncMode::kNever;
  if (name == "close") return SyncMode::kClose;
  if (name == "flush") return SyncMode::kFlush;
  throw std::invalid_argument("fsync must be never, close or flush, got " + name);
}

RunId ParseRunId(const std::string& bytes) {
  if (bytes.size() != kRunIdBytes) {
    throw std::invalid_argument("run_id must have 16 bytes, got " + std::to_string(bytes.size()));
  }
  RunId run_id;
  std::memcpy(run_id.data(), bytes.data(), run_id.size());
  return run_id;
}

std::unique_ptr<Writer> MakeWriter(const std::string& path, py::bytes schema, const LayoutArgument& layout,
                                   py::bytes run_id, double flush_seconds, const std::string& fsync,
                                   std::optional<int64_t> queue_rows, bool resume,
                                   const LayoutArgument& previous_layout) {
  WriterOptions options;
  options.store = {path,   std::string(schema),         ParseLayout(layout), ParseRunId(run_id), ParseSync(fsync),
                   resume, ParseLayout(previous_layout)};
  options.flush_seconds = flush_seconds;
  if (queue_rows) options.queue_rows = static_cast<size_t>(std::max<int64_t>(0, *queue_rows));
  const py::gil_scoped_release release;
  return std::make_unique<Writer>(options);
}

// A C-contiguous float64 buffer, held for the duration of a call.
class Cells {
 public:
  explicit Cells(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw py::error_already_set();
    if (view_.itemsize != sizeof(double) || std::strcmp(view_.format, "d") != 0) {
      const std::string format = view_.format;
      PyBuffer_Release(&view_);
      throw py::type_error("cells must be float64, got the buffer format " + format);
    }
  }
  ~Cells() { PyBuffer_Release(&view_); }
  Cells(const Cells&) = delete;
  Cells& operator=(const Cells&) = delete;
  const double* data() const { return static_cast<const double*>(view_.buf); }
  uint64_t size() const { return static_cast<uint64_t>(view_.len) / sizeof(double); }

 private:
  Py_buffer view_;
};

float Take(const std::optional<double>& value, uint32_t flag, uint32_t* flags) {
  if (value.has_value()) *flags |= flag;
  return static_cast<float>(value.value_or(0.0));
}

bool Write(Writer& writer, uint64_t step, uint64_t time_ns, py::handle cells_object, std::optional<uint64_t> tokens,
           std::optional<double> loss, std::optional<double> lr, std::optional<double> grad_scale,
           std::optional<double> total_norm, uint32_t flags) {
  const Cells cells(cells_object);
  if (tokens.has_value()) flags |= kRowHasTokens;
  RowRecord record{step, time_ns, tokens.value_or(0), 0, 0, 0, 0, 0, 0};
  record.loss = Take(loss, kRowHasLoss, &flags);
  record.lr = Take(lr, kRowHasLr, &flags);
  record.grad_scale = Take(grad_scale, kRowHasGradScale, &flags);
  record.total_norm = Take(total_norm, kRowHasTotalNorm, &flags);
  record.flags = flags;
  const Writer::Handover handover = writer.TryWrite(record, cells.data(), cells.size());
  if (handover != Writer::Handover::kBusy) return handover == Writer::Handover::kAccepted;
  const py::gil_scoped_release release;
  return writer.Write(record, cells.data(), cells.size());
}

bool WriteEvent(Writer& writer, const std::string& json) {
  if (json.find('\n') != std::string::npos) {
    throw std::invalid_argument("an event must be one line of JSON, got a newline inside");
  }
  const py::gil_scoped_release release;
  return writer.WriteEvent(json);
}

bool WriteTokens(Writer& writer, uint64_t step, std::string bytes,
                 const std::vector<py::array_t<double, py::array::c_style>>& sums) {
  std::vector<std::vector<double>> arrays;
  arrays.reserve(sums.size());
  for (const auto& array : sums) arrays.emplace_back(array.data(), array.data() + array.size());
  const py::gil_scoped_release release;
  return writer.WriteTokens(step, std::move(bytes), std::move(arrays));
}

bool ChangeSchema(Writer& writer, const std::string& schema, const LayoutArgument& argument) {
  const Layout layout = ParseLayout(argument);
  const py::gil_scoped_release release;
  return writer.ChangeSchema(schema, layout);
}

py::object Error(const Writer& writer) {
  const std::string text = writer.error();
  return text.empty() ? py::object(py::none()) : py::str(text);
}

py::bytes RunIdOf(const Writer& writer) {
  return py::bytes(reinterpret_cast<const char*>(writer.run_id().data()), kRunIdBytes);
}

py::array PackArray(const py::array_t<double, py::array::c_style>& cells, const std::string& codec_name,
                    const std::string& transform_name, const std::optional<std::string>& isa_name) {
  const Codec codec = ParseCodec(codec_name.c_str());
  const Transform transform = ParseTransform(transform_name.c_str());
  const Isa isa = isa_name.has_value() ? ParseIsa(isa_name->c_str()) : ActiveIsa();
  const char* dtype = codec == Codec::kF32 ? "<f4" : codec == Codec::kU16 ? "<u2" : "<i2";
  py::array codes(py::dtype(dtype), std::vector<py::ssize_t>(cells.shape(), cells.shape() + cells.ndim()));
  const double* from = cells.data();
  void* to = codes.mutable_data();
  const auto count = static_cast<size_t>(cells.size());
  const py::gil_scoped_release release;
  Pack(isa, codec, transform, from, count, to);
  return codes;
}

py::array_t<double> UnpackArray(const py::bytes& codes, const std::string& codec_name) {
  const Codec codec = ParseCodec(codec_name.c_str());
  const std::string_view bytes = codes;
  py::array_t<double> cells(static_cast<py::ssize_t>(bytes.size() / CodecBytes(codec)));
  Unpack(codec, bytes.data(), static_cast<size_t>(cells.size()), cells.mutable_data());
  return cells;
}

// OSError chooses its subclass by errno: FileExistsError, BlockingIOError, PermissionError, ...
void TranslateFileError(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const FileError& error) {
    const py::object exception =
        py::reinterpret_borrow<py::object>(PyExc_OSError)(error.code(), error.what(), error.path());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  }
}

}  // namespace

void BindWriter(py::module_& m) {
  py::register_local_exception_translator(TranslateFileError);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<Writer>(m, "Writer", "Writes one .mscan file from a thread of its own.")
      .def(py::init(&MakeWriter), py::arg("path"), py::arg("schema"), py::arg("layout"), py::arg("run_id"),
           py::kw_only(), py::arg("flush_seconds") = 2.0, py::arg("fsync") = "close",
           py::arg("queue_rows") = py::none(), py::arg("resume") = false, py::arg("previous_layout") = LayoutArgument())
      .def("write", &Write, py::arg("step"), py::arg("time_ns"), py::arg("cells"), py::arg("tokens") = py::none(),
           py::arg("loss") = py::none(), py::arg("lr") = py::none(), py::arg("grad_scale") = py::none(),
           py::arg("total_norm") = py::none(), py::arg("flags") = 0)
      .def("event", &WriteEvent, py::arg("json"))
      .def("tokens", &WriteTokens, py::arg("step"), py::arg("bytes"),
           py::arg("sums") = std::vector<py::array_t<double, py::array::c_style>>())
      .def("schema", &ChangeSchema, py::arg("schema"), py::arg("layout"))
      .def("flush", &Writer::Flush, py::arg("wait") = true, no_gil)
      .def("close", &Writer::Close, no_gil)
      .def_property_readonly("rows_accepted", &Writer::num_accepted)
      .def_property_readonly("rows_flushed", &Writer::num_flushed)
      .def_property_readonly("rows_dropped", &Writer::num_dropped)
      .def_property_readonly("first_row", &Writer::first_row)
      .def_property_readonly("last_step", &Writer::last_step)
      .def_property_readonly("run_id", &RunIdOf)
      .def_property_readonly("error", &Error);

  m.def("last_schema", [](const std::string& path) { return py::bytes(ReadLastSchema(path)); }, py::arg("path"));
  m.def("pack", &PackArray, py::arg("cells"), py::arg("codec"), py::arg("transform"), py::arg("isa") = py::none());
  m.def("unpack", &UnpackArray, py::arg("codes"), py::arg("codec"));
}

}  // namespace pyscan
