#include "binding/collective_pins.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <typeinfo>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/custom_class.h>

namespace trainstream {

namespace {

/// Null: there is none, or one that Python implements, which would need the GIL.
c10::intrusive_ptr<c10d::Work> work_of(const c10::IValue& value) {
    static const c10::ClassTypePtr kType =
        torch::getCustomClass("__torch__.torch.classes.c10d.Work");
    if (kType == nullptr || !value.isObject() || value.type() != kType) {
        return nullptr;
    }
    auto work = value.toCustomClass<c10d::Work>();
    if (work != nullptr &&
        std::string_view(typeid(*work).name()).find("Py") != std::string_view::npos) {
        return nullptr;
    }
    return work;
}

bool is_of_nccl(const c10d::Work& work) {
    return std::string_view(typeid(work).name()).find("NCCL") != std::string_view::npos;
}

void keep_for_good(CollectivePins::Held* held) {
    for (auto& [pager, pins] : *held) {
        pager->keep_for_good(pins);
        pager->end_use(&pins);
    }
}

}  // namespace

CollectivePins& CollectivePins::instance() {
    static auto* pins = new CollectivePins;
    return *pins;
}

void CollectivePins::add(const std::vector<c10::IValue>& outputs, Held held) {
    for (const c10::IValue& output : outputs) {
        const auto work = work_of(output);
        if (work == nullptr) {
            continue;
        }
        Collective collective{output, std::move(held)};
        try {
            collective.at_once = is_of_nccl(*work) && work->isCompleted();
        } catch (const std::exception&) {
            keep_for_good(&collective.held);  // Its group was aborted: who knows what still runs.
            return;
        }
        collective.steps = collective.held.front().first->steps();
        std::lock_guard<std::mutex> lock(mutex_);
        under_way_.push_back(std::move(collective));
        count_.store(under_way_.size());
        return;
    }
    keep_for_good(&held);
}

bool CollectivePins::is_done(const Collective& collective) {
    if (collective.at_once && collective.held.front().first->steps() == collective.steps) {
        return false;
    }
    try {
        return work_of(collective.work)->isCompleted();
    } catch (const std::exception&) {
        return false;  // For as long as the process lives, which is not long as a rule.
    }
}

void CollectivePins::release_done() {
    std::vector<Collective> done;
    {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) {
            return;  // Another thread looks.
        }
        // They end about in order, so the first that is under way ends the look.
        const auto rest = std::find_if(under_way_.begin(), under_way_.end(),
                                       [](const Collective& each) { return !is_done(each); });
        done.assign(std::make_move_iterator(under_way_.begin()), std::make_move_iterator(rest));
        under_way_.erase(under_way_.begin(), rest);
        count_.store(under_way_.size());
    }
    for (Collective& collective : done) {
        for (auto& [pager, pins] : collective.held) {
            pager->end_use(&pins);
        }
    }
}

}  // namespace trainstream
