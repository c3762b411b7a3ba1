#include "binding/collective_pins.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <typeinfo>

#include <torch/custom_class.h>

namespace trainstream {

namespace {

// They end about in order: behind so many that run no other is asked about.
constexpr int kMostRunning = 4;

bool is_named(const c10d::Work& work, std::string_view part) {
    return std::string_view(typeid(work).name()).find(part) != std::string_view::npos;
}

/// Null: there is none, or one that Python implements, which would need the GIL.
c10::intrusive_ptr<c10d::Work> work_of(const c10::IValue& value) {
    static const c10::ClassTypePtr kType =
        torch::getCustomClass("__torch__.torch.classes.c10d.Work");
    if (kType == nullptr || !value.isObject() || value.type() != kType) {
        return nullptr;
    }
    auto work = value.toCustomClass<c10d::Work>();
    return work != nullptr && is_named(*work, "Py") ? nullptr : work;
}

/// Gloo's: what runs holds its Work, and one that somebody has to wait for runs nothing by itself
/// but what it made.
bool ends_when_forgotten(const c10d::Work& work) {
    return is_named(work, "Gloo") || is_named(work, "LambdaWork");
}

void keep_for_good(CollectivePins::Helds* helds) {
    for (CollectivePins::Held& held : *helds) {
        Pager& pager = *held.given.pager;
        pager.keep_for_good(held.given.pins);
        pager.end_use(&held.given.pins);
    }
}

}  // namespace

CollectivePins& CollectivePins::instance() {
    static auto* pins = new CollectivePins;
    return *pins;
}

uint64_t CollectivePins::add(const std::vector<c10::IValue>& outputs, Helds held) {
    Collective collective;
    for (const c10::IValue& output : outputs) {
        if ((collective.work = work_of(output)) != nullptr) {
            break;
        }
    }
    if (collective.work == nullptr) {
        keep_for_good(&held);
        return 0;
    }
    try {
        collective.is_nccl = is_named(*collective.work, "NCCL");
        collective.at_once = collective.is_nccl && collective.work->isCompleted();
    } catch (const std::exception&) {
        keep_for_good(&held);  // Its group was aborted: who knows what still runs.
        return 0;
    }
    collective.steps = held.front().given.pager->steps();
    collective.held = std::move(held);
    std::lock_guard<std::mutex> lock(mutex_);
    collective.name = ++names_;
    under_way_.push_back(std::move(collective));
    count_.store(under_way_.size());
    return names_;
}

CollectivePins::Made::~Made() {
    for (PagerPins& each : pins) {
        if (for_good) {
            each.pager->keep_for_good(each.pins);
        }
        each.pager->end_use(&each.pins);
    }
}

void CollectivePins::keep_made(const std::vector<uint64_t>& names, std::vector<PagerPins>* pins) {
    const auto made = std::make_shared<Made>();
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Collective*> collectives;
    for (Collective& collective : under_way_) {
        if (std::find(names.begin(), names.end(), collective.name) != names.end()) {
            collectives.push_back(&collective);
            collective.made = made;
        }
    }
    for (PagerPins& all : *pins) {
        uint64_t newest_before = UINT64_MAX;
        for (const Collective* collective : collectives) {
            for (const Held& held : collective->held) {
                if (held.given.pager == all.pager) {
                    newest_before = std::min(newest_before, held.newest_before);
                }
            }
        }
        const auto was_there = [&](const Pin& pin) { return pin.storage->serial <= newest_before; };
        const auto first = std::stable_partition(all.pins.begin(), all.pins.end(), was_there);
        if (first != all.pins.end()) {
            made->pins.push_back({all.pager, {}});
            made->pins.back().pins.assign(first, all.pins.end());
            all.pins.erase(first, all.pins.end());
        }
    }
}

/// One of a group, perhaps, that has not ended.
bool CollectivePins::waits_for_step(const Collective& collective) {
    return collective.at_once && collective.held.front().given.pager->steps() == collective.steps;
}

bool CollectivePins::says_done(const Collective& collective) {
    if (waits_for_step(collective)) {
        return false;
    }
    try {
        return collective.work->isCompleted();
    } catch (const std::exception&) {
        return false;  // For as long as the process lives, which is not long as a rule.
    }
}

/// Whoever was to wait for it has done so, or never will. Not NCCL's: its threads hold a copy.
bool CollectivePins::is_forgotten(const Collective& collective) {
    return collective.work.use_count() == 1;
}

void CollectivePins::end(Collective* collective) {
    const bool done = says_done(*collective);
    const bool has_ended = done || ends_when_forgotten(*collective->work);
    collective->work.reset();  // With it what it alone still held.
    if (!done && collective->made != nullptr) {
        // Nobody waited, perhaps: what it began may still use what it made, till that ends.
        collective->made->for_good = true;
    }
    collective->made.reset();
    for (Held& held : collective->held) {
        Pager& pager = *held.given.pager;
        if (!has_ended) {
            pager.keep_for_good(held.given.pins);
        }
        pager.end_use(&held.given.pins);
    }
}

void CollectivePins::release_done() {
    std::vector<Collective> done;
    {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) {
            return;  // Another thread looks.
        }
        int running = 0;  // Of NCCL's, each of which cost a question to the driver.
        const auto is_over = [&](const Collective& each) {
            if (!each.is_nccl) {
                return is_forgotten(each) || says_done(each);
            }
            if (running == kMostRunning || waits_for_step(each)) {
                return false;
            }
            const bool done = says_done(each);
            running += done ? 0 : 1;
            return done;
        };
        const auto rest = std::stable_partition(under_way_.begin(), under_way_.end(), is_over);
        done.assign(std::make_move_iterator(under_way_.begin()), std::make_move_iterator(rest));
        under_way_.erase(under_way_.begin(), rest);
        count_.store(under_way_.size());
    }
    for (Collective& collective : done) {
        end(&collective);
    }
}

}  // namespace trainstream
