#include "worker/generation.h"

#include <algorithm>

namespace meshnet {

bool begins_step(const v1::GenerateRequest & request, uint32_t position) {
    const auto n_tokens = static_cast<uint32_t>(request.tokens_size());
    const uint32_t index = position - request.cached_tokens();
    return index == 0 || index >= n_tokens - request.replayed_tokens() || index + 1 == n_tokens ||
           position % request.chunk_tokens() == 0;
}

Generation::Generation(const v1::GenerateRequest & request, uint32_t token_capacity, std::shared_ptr<EventSink> sink,
                       int64_t now_us)
    : sink_(std::move(sink)), prompt_(request.tokens().begin(), request.tokens().end()),
      stop_tokens_(request.stop_tokens().begin(), request.stop_tokens().end()), sampling_(request.sampling()),
      resume_at_(request.resume_at().begin(), request.resume_at().end()), start_(request.cached_tokens()),
      replay_from_(prompt_.size() - request.replayed_tokens()), chunk_tokens_(request.chunk_tokens()),
      max_new_tokens_(request.max_new_tokens()), token_capacity_(token_capacity),
      step_timeout_ms_(request.step_timeout_ms()), ignore_eog_(request.ignore_eog()), started_us_(now_us) {}

size_t Generation::step_length() const {
    if (fed_tokens_ >= replay_from_) {
        return 1;
    }
    const size_t position = start_ + fed_tokens_;
    const size_t n = std::min<size_t>(chunk_tokens_ - position % chunk_tokens_, replay_from_ - fed_tokens_);
    // Only where a hop holds all but the last token does it lie inside a chunk.
    return !resume_at_.empty() && resume_at_.back() > position ? std::min<size_t>(n, resume_at_.back() - position) : n;
}

v1::StepFrame Generation::next_step() {
    v1::StepFrame frame;
    if (next_is_prefill()) {
        const size_t n = step_length();
        const auto first = prompt_.begin() + static_cast<std::ptrdiff_t>(fed_tokens_);
        frame.set_position(start_ + static_cast<uint32_t>(fed_tokens_));
        frame.mutable_tokens()->Add(first, first + static_cast<std::ptrdiff_t>(n));
        frame.set_prefill(true);
        if (fed_tokens_ == 0) {
            frame.set_rollback(true);
            *frame.mutable_sampling() = sampling_;
            frame.set_step_timeout_ms(step_timeout_ms_);
            frame.mutable_resume_at()->Add(resume_at_.begin(), resume_at_.end());
        }
        fed_tokens_ += n;
    } else {
        frame.set_position(start_ + static_cast<uint32_t>(prompt_.size()) + generated_tokens_ - 1);
        frame.add_tokens(last_token_);
        decode_ready_ = false;
    }
    if (!next_is_prefill()) {
        frame.add_sample_at(static_cast<uint32_t>(frame.tokens_size()) - 1);
        awaits_sample_ = true;
    }
    return frame;
}

void Generation::on_prefill_done(uint32_t n) {
    if (generated_tokens_ == 0 && n > 0) {
        done_tokens_ = std::min(done_tokens_ + n, prompt_.size());
        report_prefill();
    }
}

bool Generation::on_sampled(const v1::SampledFrame & frame, bool is_eog, int64_t now_us, std::string & problem) {
    const uint32_t position = start_ + static_cast<uint32_t>(prompt_.size()) + generated_tokens_;
    if (!awaits_sample_ || frame.tokens_size() != 1) {
        problem = "a sampled token came that was not asked for";
        return false;
    }
    if (frame.tokens(0).position() != position) {
        problem = "the sampled token is for position " + std::to_string(frame.tokens(0).position()) + ", not " +
                  std::to_string(position);
        return false;
    }
    awaits_sample_ = false;
    if (generated_tokens_ == 0) {
        first_token_us_ = now_us;
        if (done_tokens_ < prompt_.size()) {
            done_tokens_ = prompt_.size();
            report_prefill();
        }
    }
    ++generated_tokens_;
    last_token_ = frame.tokens(0).token();
    v1::GenerateEvent event;
    *event.mutable_token() = frame.tokens(0);
    event.mutable_token()->set_is_eog(is_eog);
    sink_->push(std::move(event), false);

    const bool is_stop = std::find(stop_tokens_.begin(), stop_tokens_.end(), last_token_) != stop_tokens_.end();
    if (is_eog && !ignore_eog_) {
        finish(v1::FINISH_EOG, now_us);
    } else if (is_stop) {
        finish(v1::FINISH_STOP_TOKEN, now_us);
    } else if (max_new_tokens_ != 0 && generated_tokens_ >= max_new_tokens_) {
        finish(v1::FINISH_LENGTH, now_us);
    } else if (position + 1 >= token_capacity_) {
        finish(v1::FINISH_CAPACITY, now_us);
    } else {
        decode_ready_ = true;
    }
    return true;
}

void Generation::finish(v1::FinishCause cause, int64_t now_us) {
    finished_ = true;
    v1::GenerateEvent event;
    auto * finished = event.mutable_finished();
    finished->set_cause(cause);
    finished->set_generated_tokens(generated_tokens_);
    finished->set_prefill_us(static_cast<uint64_t>(first_token_us_ - started_us_));
    finished->set_decode_us(static_cast<uint64_t>(now_us - first_token_us_));
    sink_->push(std::move(event), true);
}

void Generation::report_prefill() {
    v1::GenerateEvent event;
    event.mutable_prefill()->set_done_tokens(static_cast<uint32_t>(done_tokens_));
    event.mutable_prefill()->set_total_tokens(static_cast<uint32_t>(prompt_.size()));
    sink_->push(std::move(event), false);
}

void Generation::fail(v1::Failed failed) {
    finished_ = true;
    v1::GenerateEvent event;
    *event.mutable_failed() = std::move(failed);
    sink_->push(std::move(event), true);
}

}  // namespace meshnet
