#include "binding/thread_roster.h"

#include <algorithm>

namespace trainstream {

ThreadRoster& ThreadRoster::instance() {
    static auto* roster = new ThreadRoster;
    return *roster;
}

void ThreadRoster::join(Line* line) {
    std::lock_guard<std::mutex> lock(mutex_);
    lines_.push_back(line);
}

void ThreadRoster::leave(Line* line) {
    std::lock_guard<std::mutex> lock(mutex_);
    lines_.erase(std::remove(lines_.begin(), lines_.end(), line), lines_.end());
}

void ThreadRoster::start() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Line* line : lines_) {
        line->at_start = line->boundaries.load();
    }
}

bool ThreadRoster::all_announced() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::all_of(lines_.begin(), lines_.end(), [](const Line* line) {
        return line->boundaries.load() >= line->at_start + kEnough;
    });
}

size_t ThreadRoster::user_threads() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(std::count_if(lines_.begin(), lines_.end(), [](const Line* line) {
        return line->uses_device.load(std::memory_order_relaxed) &&
               !line->is_ours.load(std::memory_order_relaxed) &&
               !line->is_autograds.load(std::memory_order_relaxed);
    }));
}

}  // namespace trainstream
