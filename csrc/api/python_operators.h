// Operators in Python that C++ calls by torch's dispatcher, flash_ext_python::* (flash_ext/python_operators.py).
//
// Exceptions do not pass through torch's C functions, and results of several types do not in torch 2.10 to 2.13. So all
// results are tensors, and one more tensor follows them. It is empty or holds an exception as two numbers: a function
// that throws it, and the function's argument. Thrown here, the exception reaches the caller of our operator as it was
// in Python.
#pragma once

#include "checks.h"

namespace flash_ext::api {

/// Throws the exception of an operator's last result, if there is one.
void throw_if_any(const Tensor& exception);

/// A new tensor by torch's function in Python, for memory that torch's C function could not allocate: the C function
/// only says that it failed. Throws torch.OutOfMemoryError with torch's text, unless there is memory by now.
Tensor empty_strided_by_python(const Tensor& like, const Shape& shape, const Shape& strides, ScalarType dtype);

}  // namespace flash_ext::api
