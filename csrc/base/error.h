// csrc/base/error.h: every kind of error and its wording, in one place.
//
// A message says what failed, how much was asked, why it failed with every number that decided it,
// and what to do. The kind is for code, the text for a person.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace trainstream {

enum class ErrorKind : uint8_t {
    kInvalidArgument,  // A caller's value is out of range.
    kOutOfMemory,      // Neither the budget nor host memory has room.
    kCopyFailed,       // A copy between device and host was refused.
    kDevice,           // The device or its runtime reported a fault.
};

class Error : public std::runtime_error {
public:
    Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
    ErrorKind kind() const { return kind_; }

private:
    ErrorKind kind_;
};

/// The numbers that decide whether an allocation fits.
struct MemoryNumbers {
    uint64_t asked_bytes = 0;
    uint64_t budget_bytes = 0;
    uint64_t in_use_bytes = 0;  // Managed storages in device memory.
    uint64_t pinned_bytes = 0;  // Of these, what cannot leave now.
    uint64_t host_limit_bytes = 0;
    uint64_t host_in_use_bytes = 0;
};

/// The terms of what a run needs at once, and what it may use.
struct FitNumbers {
    uint64_t fixed_bytes = 0;     // Device, outside the blocks.
    uint64_t resident_bytes = 0;  // Device, blocks that stay.
    uint64_t inflight_bytes = 0;  // Device, blocks on their way.
    uint64_t paged_bytes = 0;     // Host.
    uint64_t device_budget_bytes = 0;
    uint64_t host_budget_bytes = 0;
};

namespace errors {

Error out_of_memory(const MemoryNumbers& numbers);
/// Host memory that is not a storage's: optimizer states.
Error host_memory_exhausted(uint64_t asked_bytes, uint64_t in_use_bytes, uint64_t limit_bytes);
/// A run that cannot fit, before it starts.
Error does_not_fit(const FitNumbers& numbers);
Error copy_failed(const char* direction, size_t size_bytes, const std::string& reason);
Error device(const char* call, const std::string& reason);
/// A fused step that was put off, of weights that are as they were before it.
Error late_update_failed(const std::string& reason);
Error invalid_argument(const std::string& text);
/// Addresses for host memory were refused; no memory was taken yet.
Error host_range_refused(size_t size_bytes, const std::string& reason);

/// Not an error but a message, said once: pinning was refused, and what that means.
std::string pin_refused(size_t size_bytes, uint64_t locked_bytes, const std::string& reason);

}  // namespace errors
}  // namespace trainstream
