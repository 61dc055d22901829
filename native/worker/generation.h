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

// Whether a step of the generation begins at `position`, one of the request's tokens, or can: at the last token. Prompt
// chunks end at multiples of chunk_tokens, counted from position 0 whatever was cached; so a continued prefill has the
// steps of an undisturbed one.
bool begins_step(const v1::GenerateRequest & request, uint32_t position);

class Generation {
  public:
    // `request` must have been checked: at least one token, ids in the vocabulary, prompt and one more token within
    // `token_capacity`, chunk_tokens set, no more replayed tokens than tokens, a good resume_at.
    Generation(const v1::GenerateRequest & request, uint32_t token_capacity, std::shared_ptr<EventSink> sink,
               int64_t now_us);

    EventSink & sink() const {
        return *sink_;
    }
    const std::shared_ptr<EventSink> & shared_sink() const {
        return sink_;
    }

    // A given token is left, or a sampled one waits to be fed back.
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
    // Tokens of the next step while next_is_prefill().
    size_t step_length() const;
    void finish(v1::FinishCause cause, int64_t now_us);
    void report_prefill();

    const std::shared_ptr<EventSink> sink_;
    const std::vector<uint32_t> prompt_;  // and what was generated before the route was repaired
    const std::vector<uint32_t> stop_tokens_;
    const v1::SamplingParams sampling_;
    const std::vector<uint32_t> resume_at_;
    const uint32_t start_;      // position of prompt_[0]
    const size_t replay_from_;  // index of the first replayed token in prompt_
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
