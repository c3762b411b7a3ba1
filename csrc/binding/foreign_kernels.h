// csrc/binding/foreign_kernels.h: whether code is loaded whose kernels nobody announces.
#pragma once

namespace trainstream {

/// A library that is built against torch but is not torch's, torchvision's, torchaudio's or ours: a
/// function of it may take a tensor's address with no operator and no Python between. Reads of
/// weights in host memory are right all the same; that their update still waits, nobody can tell.
/// Looks at all libraries once more after one was loaded.
bool foreign_kernels_loaded();

}  // namespace trainstream
