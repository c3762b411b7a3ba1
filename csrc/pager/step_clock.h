// csrc/pager/step_clock.h: where the device's time goes in a step.
//
// Marks on the compute stream, read once they are done: nobody waits for a time.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "device/device.h"

namespace trainstream {

/// Why the compute stream waited for a copy.
enum class Stall : uint8_t {
    kLate,    // Loaded ahead, and not there yet.
    kDemand,  // Loaded when an operator asked.
    kRoom,    // What had to leave first.
};
constexpr size_t kStalls = 3;

/// Running totals of bytes, and of one step what they rose by.
struct StepBytes {
    uint64_t to_device = 0;
    uint64_t to_host = 0;
    uint64_t in_place = 0;
};

/// One step on the device.
struct StepTimes {
    uint64_t number = 0;  // How many steps had ended before it.
    uint64_t step_ns = 0;
    std::array<uint64_t, kStalls> stall_ns{};  // By cause; part of step_ns.
    uint64_t update_ns = 0;                    // Waiting for updates in host memory; another part.
    StepBytes bytes;
    uint64_t operations = 0;

    /// How long the device had computed, and waited, when so many operations of the step had begun.
    struct Point {
        uint64_t operation = 0;
        uint64_t compute_ns = 0;
        std::array<uint64_t, kStalls> stall_ns{};  // By cause.
    };
    std::vector<Point> points;  // Rising, from {0, 0} to {operations, compute_ns()}.

    uint64_t all_stall_ns() const;
    /// What is left when nothing is waited for. A kernel that uses cold bytes counts as compute.
    uint64_t compute_ns() const { return step_ns - std::min(step_ns, all_stall_ns() + update_ns); }
    /// At `operation`, between points in proportion.
    uint64_t compute_ns_at(uint64_t operation) const;
};

/// Measures the stream that most operators of the step before ran on.
///
/// A mark that the device refuses costs the measurement, and nothing else.
///
/// Owner: the pager. Lock: its own, of rank kStepClock, not held while waiting.
///
/// Invariant: `marks_` are in the order of the stream's work, but for other threads' by a few.
class StepClock {
public:
    explicit StepClock(Device& device) : device_(device) {}

    /// An outermost operator is about to run on `stream`.
    void operator_began(StreamId stream);
    /// device.wait(), and how long that was.
    void wait(StreamId stream, const Event& event, Stall cause);
    /// The script waits for updates in host memory, from what `stream` has now to what it has when
    /// they have ended. What is waited for meanwhile is part of that.
    void update_began(StreamId stream);
    void update_ended(StreamId stream);
    /// `total`: bytes moved since the start of the run.
    void step_ended(const StepBytes& total);
    /// Operators are not announced any more: the step that runs is not measured.
    void interrupt();

    /// Time that compute waited for copies in all steps so far, as far as it is known.
    uint64_t all_stall_ns();
    /// The step of median length of the last few that were measured whole, from number
    /// `first_step` on. Nothing: so far it would be of fewer than `least`.
    std::optional<StepTimes> usual_step(uint64_t first_step = 0, size_t least = 1);
    /// How many have ended.
    uint64_t steps();

private:
    enum class Kind : uint8_t { kOperator, kWait, kUpdate, kEnd };

    struct Mark {
        Kind kind = Kind::kOperator;
        Event at = {};
        Event until = {};  // Of a wait or an update.
        Stall cause = Stall::kLate;
        uint64_t operation = 0;
        StepBytes bytes = {};  // Of an end: that step's, and
        uint64_t number = 0;   // its number.
    };

    Event mark(StreamId stream) noexcept;
    void add(Mark mark) TS_REQUIRES(mutex_);
    void read_marks() noexcept TS_REQUIRES(mutex_);
    bool read_next() TS_REQUIRES(mutex_);
    void read(const Mark& mark) TS_REQUIRES(mutex_);
    void forget() TS_REQUIRES(mutex_);

    Device& device_;
    Mutex mutex_{LockRank::kStepClock};
    StreamId stream_ TS_GUARDED_BY(mutex_) = 0;
    std::map<StreamId, uint64_t> operators_ TS_GUARDED_BY(mutex_);  // Of this step, by stream.
    uint64_t operation_ TS_GUARDED_BY(mutex_) = 0;                  // Of this step, so far.
    uint64_t ended_ TS_GUARDED_BY(mutex_) = 0;                      // Steps.
    bool is_whole_ TS_GUARDED_BY(mutex_) = false;  // This step is measured from its beginning.
    Event update_began_ TS_GUARDED_BY(mutex_);     // Null: no update is waited for.
    std::optional<StepBytes> begin_bytes_ TS_GUARDED_BY(mutex_);
    std::deque<Mark> marks_ TS_GUARDED_BY(mutex_);  // Not read yet.

    // The step whose marks are being read.
    Event begin_ TS_GUARDED_BY(mutex_);
    StepTimes times_ TS_GUARDED_BY(mutex_);
    std::deque<StepTimes> steps_ TS_GUARDED_BY(mutex_);  // The last ones.
    uint64_t all_stall_ns_ TS_GUARDED_BY(mutex_) = 0;
};

}  // namespace trainstream
