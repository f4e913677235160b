// What each part adds to the module lmtrain._native; native.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_blocks(py::module_& module);
void bind_crc32c(py::module_& module);
void bind_encoder(py::module_& module);
void bind_index(py::module_& module);
void bind_mapped(py::module_& module);
void bind_masked(py::module_& module);
void bind_minhash(py::module_& module);
void bind_permute(py::module_& module);
void bind_rows(py::module_& module);
void bind_sentence_pairs(py::module_& module);
void bind_sentences(py::module_& module);
