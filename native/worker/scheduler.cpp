#include "worker/scheduler.h"

namespace meshnet {

std::vector<size_t> Scheduler::choose(const std::vector<ReadyStep> & ready) {
    const size_t none = ready.size();
    size_t decode = none;  // not yet served in this round
    size_t prefill = none;
    size_t oldest = none;
    const auto older = [&](size_t a, size_t b) { return b == none || ready[a].last_served < ready[b].last_served; };
    for (size_t i = 0; i < ready.size(); ++i) {
        if (older(i, oldest)) {
            oldest = i;
        }
        if (ready[i].prefill) {
            prefill = older(i, prefill) ? i : prefill;
        } else if (ready[i].last_served <= round_start_) {
            decode = older(i, decode) ? i : decode;
        }
    }
    if (ready.empty()) {
        return {};
    }
    ++served_;
    if (decode != none) {
        return {decode};
    }
    if (prefill != none) {
        round_start_ = served_;  // a prefill chunk ends the round
        return {prefill};
    }
    round_start_ = served_ - 1;
    return {oldest};
}

}  // namespace meshnet
