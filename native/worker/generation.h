// The head's loop of one generation: which step comes next, and what a sampled token means.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "meshnet/v1/shard.pb.h"
#include "worker/prefix.h"
#include "worker/seam_types.h"

namespace meshnet {

class Generation {
  public:
    // `request` must have been checked: at least one token, ids in the vocabulary, prompt and one more token within
    // `token_capacity`, chunk_tokens set.
    Generation(const v1::GenerateRequest & request, uint32_t token_capacity, std::shared_ptr<EventSink> sink,
               int64_t now_us);

    EventSink & sink() const {
        return *sink_;
    }
    const std::shared_ptr<EventSink> & shared_sink() const {
        return sink_;
    }

    // A prompt chunk is left, or a sampled token waits to be fed back.
    bool has_step() const {
        return fed_tokens_ < prompt_.size() || decode_ready_;
    }
    bool next_is_prefill() const {
        return fed_tokens_ < prompt_.size();
    }
    bool awaits_sample() const {
        return awaits_sample_;
    }

    // The next step (has_step()); the caller adds hash and boundary. The first one rolls every hop back to its
    // position, so that nothing a cancelled generation left behind is kept.
    v1::StepFrame next_step();

    // `n` more prompt tokens are computed by the next hop.
    void on_prefill_done(uint32_t n);

    // The ring brought a token back. Emits it and, if it is the last, the end. False with a reason if it is not what
    // was asked for.
    bool on_sampled(const v1::SampledFrame & frame, bool is_eog, int64_t now_us, std::string & problem);

    bool finished() const {
        return finished_;
    }
    void fail(v1::Failed failed);

  private:
    void finish(v1::FinishCause cause, int64_t now_us);
    void report_prefill();

    const std::shared_ptr<EventSink> sink_;
    const std::vector<uint32_t> prompt_;
    const std::vector<uint32_t> stop_tokens_;
    const v1::SamplingParams sampling_;
    const uint32_t start_;  // position of prompt_[0]
    const uint32_t chunk_tokens_;
    const uint32_t max_new_tokens_;
    const uint32_t token_capacity_;
    const uint32_t step_timeout_ms_;
    const bool ignore_eog_;
    const int64_t started_us_;

    size_t fed_tokens_ = 0;   // of prompt_
    size_t done_tokens_ = 0;  // of prompt_, computed by the next hop
    uint32_t generated_tokens_ = 0;
    uint32_t last_token_ = 0;
    bool decode_ready_ = false;   // last_token_ waits to be fed back
    bool awaits_sample_ = false;  // a step that samples is on its way
    bool finished_ = false;
    int64_t first_token_us_ = 0;
};

}  // namespace meshnet
