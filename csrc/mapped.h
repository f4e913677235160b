// Whether a file that is mapped could not be read.
#pragma once

namespace lmtrain {

bool mapping_failed();

}  // namespace lmtrain
