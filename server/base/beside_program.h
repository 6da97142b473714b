#pragma once

#include <string>

namespace weightwire {

/// Where `library` ("libweightwire_cuda.so") lies: beside the program, or below the lib beside its
/// folder, as it is built and installed; else its name, for the loader to search.
std::string BesideProgram(const std::string& library);

}  // namespace weightwire
