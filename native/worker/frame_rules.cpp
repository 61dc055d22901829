#include "worker/frame_rules.h"

#include <algorithm>
#include <cmath>

#include "worker/convert.h"
#include "worker/generation.h"
#include "worker/sampler.h"

namespace meshnet {
namespace {

// Room for everything in a frame but boundary data and tokens: ids, names, shapes, sampling parameters.
constexpr uint64_t frame_overhead_bytes = 1 << 20;
constexpr uint64_t token_bytes = 4 + 5;  // the token, and its index in sample_at
// Sampling parameters travel on in a frame, beside its other small parts (max_small_parts_bytes).
constexpr size_t max_sampling_bytes = 256 << 10;

Refusal out_of_range(const char * name, const char * range) {
    return bad_request(std::string("sampling.") + name + " must be " + range);
}

Refusal check_rising(const google::protobuf::RepeatedField<uint32_t> & resume_at, uint32_t n_hops) {
    if (static_cast<uint32_t>(resume_at.size()) != n_hops) {
        return {v1::REFUSAL_BAD_REQUEST, "resume_at must have one position per hop of the route",
                static_cast<uint64_t>(resume_at.size()), n_hops};
    }
    if (!std::is_sorted(resume_at.begin(), resume_at.end())) {
        return bad_request("resume_at must not fall from one hop to the next");
    }
    return Refusal::none();
}

}  // namespace

FrameRules::FrameRules(const EngineDescription & description) : description_(description) {
    uint64_t boundary_bytes =
        std::max(description.boundary_in.bytes_per_token(), description.boundary_out.bytes_per_token());
    for (const auto & boundary : description.cut_boundaries) {
        boundary_bytes = std::max<uint64_t>(boundary_bytes, boundary.bytes_per_token());
    }
    const uint64_t fitting = (max_message_bytes - frame_overhead_bytes) / (boundary_bytes + token_bytes);
    max_step_tokens_ =
        static_cast<uint32_t>(std::min<uint64_t>({description.step_tokens, fitting, max_session_tokens}));
}

Refusal FrameRules::check_token(uint32_t token) const {
    if (token >= description_.n_vocab) {
        return bad_request("token " + std::to_string(token) + " is not in the vocabulary of " +
                           std::to_string(description_.n_vocab));
    }
    return Refusal::none();
}

Refusal FrameRules::check_step(const v1::StepFrame & frame) const {
    const auto n = static_cast<uint32_t>(frame.tokens_size());
    if (n < 1 || n > max_step_tokens_) {
        return {v1::REFUSAL_BAD_REQUEST, "a step has 1 to " + std::to_string(max_step_tokens_) + " tokens", n,
                max_step_tokens_};
    }
    if (frame.position() > max_session_tokens - n) {
        return bad_request("position " + std::to_string(frame.position()) + " is beyond any session");
    }
    for (const uint32_t token : frame.tokens()) {
        if (auto refusal = check_token(token); refusal.refused()) {
            return refusal;
        }
    }
    for (int i = 0; i < frame.sample_at_size(); ++i) {
        if (frame.sample_at(i) >= n || (i > 0 && frame.sample_at(i) <= frame.sample_at(i - 1))) {
            return bad_request("sample_at must be rising indices below " + std::to_string(n));
        }
    }
    if (frame.has_sampling()) {
        if (auto refusal = check_sampling(frame.sampling()); refusal.refused()) {
            return refusal;
        }
    } else if (frame.resume_at_size() > 0) {
        return bad_request("resume_at belongs to the first frame of a generation, which has sampling parameters");
    }
    return check_boundary(frame);
}

Refusal FrameRules::check_boundary(const v1::StepFrame & frame) const {
    const auto & schema = description_.boundary_in.tensors;
    if (static_cast<size_t>(frame.boundary_size()) != schema.size()) {
        return bad_request("the boundary has " + std::to_string(schema.size()) + " tensors, not " +
                           std::to_string(frame.boundary_size()));
    }
    for (size_t i = 0; i < schema.size(); ++i) {
        const auto & tensor = frame.boundary(static_cast<int>(i));
        const auto & spec = schema[i];
        if (tensor.name() != spec.name || tensor.dtype() != to_wire(spec.dtype) ||
            !std::equal(tensor.shape().begin(), tensor.shape().end(), spec.shape.begin(), spec.shape.end())) {
            return bad_request("boundary tensor " + std::to_string(i) + " must be " + spec.name + " of type " +
                               dtype_name(spec.dtype) + " with the agreed shape");
        }
        const size_t expected = spec.bytes_per_token() * static_cast<size_t>(frame.tokens_size());
        if (tensor.data().size() != expected) {
            return {v1::REFUSAL_BAD_REQUEST, "boundary tensor " + spec.name + " has the wrong number of bytes",
                    tensor.data().size(), expected};
        }
    }
    return Refusal::none();
}

Refusal FrameRules::check_sampling(const v1::SamplingParams & params) const {
    if (const size_t bytes = params.ByteSizeLong(); bytes > max_sampling_bytes) {
        return {v1::REFUSAL_BAD_REQUEST, "the sampling parameters, biases included, take too many bytes", bytes,
                max_sampling_bytes};
    }
    // Written so that a NaN fails every test.
    const auto within = [](float value, float low, float high) { return value >= low && value <= high; };
    if (!within(params.temperature(), 0.0f, 100.0f)) {
        return out_of_range("temperature", "0 to 100");
    }
    if (!within(params.top_p(), 0.0f, 1.0f)) {
        return out_of_range("top_p", "0 to 1");
    }
    if (!within(params.min_p(), 0.0f, 1.0f)) {
        return out_of_range("min_p", "0 to 1");
    }
    if (!within(params.typical_p(), 0.0f, 1.0f)) {
        return out_of_range("typical_p", "0 to 1");
    }
    if (params.penalty_last_n() < -1) {
        return out_of_range("penalty_last_n", "-1 or more");
    }
    if (params.repeat_penalty() != 0.0f && !within(params.repeat_penalty(), 0.01f, 100.0f)) {
        return out_of_range("repeat_penalty", "0 (off) or 0.01 to 100");
    }
    if (!within(params.frequency_penalty(), -100.0f, 100.0f)) {
        return out_of_range("frequency_penalty", "-100 to 100");
    }
    if (!within(params.presence_penalty(), -100.0f, 100.0f)) {
        return out_of_range("presence_penalty", "-100 to 100");
    }
    if (params.logprobs() > 1 + max_top_logprobs) {
        return out_of_range("logprobs", "0 to 21 (1 + top tokens)");
    }
    for (const auto & [token, bias] : params.logit_bias()) {
        if (auto refusal = check_token(token); refusal.refused()) {
            return refusal;
        }
        if (!std::isfinite(bias)) {
            return out_of_range("logit_bias", "finite");
        }
    }
    return Refusal::none();
}

Refusal FrameRules::check_tokens(const v1::GenerateRequest & request) const {
    const auto n = static_cast<uint64_t>(request.tokens_size());
    if (n == 0) {
        return bad_request("a generation needs at least one token that is not cached");
    }
    for (const uint32_t token : request.tokens()) {
        if (auto refusal = check_token(token); refusal.refused()) {
            return refusal;
        }
    }
    if (request.replayed_tokens() > n) {
        return {v1::REFUSAL_BAD_REQUEST, "replayed_tokens counts the last of `tokens`", request.replayed_tokens(), n};
    }
    if (request.chunk_tokens() > max_step_tokens_) {
        return {v1::REFUSAL_BAD_REQUEST, "chunk_tokens is above this worker's max_step_tokens", request.chunk_tokens(),
                max_step_tokens_};
    }
    return Refusal::none();
}

Refusal FrameRules::check_resume(const v1::GenerateRequest & request, uint32_t n_hops) {
    const auto & resume_at = request.resume_at();
    if (resume_at.empty()) {
        return Refusal::none();
    }
    if (auto refusal = check_rising(resume_at, n_hops); refusal.refused()) {
        return refusal;
    }
    if (resume_at[0] != request.cached_tokens()) {
        return {v1::REFUSAL_BAD_REQUEST, "the first of resume_at must be cached_tokens", resume_at[0],
                request.cached_tokens()};
    }
    const uint64_t last = uint64_t{request.cached_tokens()} + static_cast<uint64_t>(request.tokens_size()) - 1;
    for (const uint32_t position : resume_at) {
        if (position > last) {
            return {v1::REFUSAL_BAD_REQUEST, "every hop must compute the last token at least", position, last};
        }
        if (!begins_step(request, position)) {
            return bad_request("position " + std::to_string(position) +
                               " of resume_at is inside a prefill chunk; chunks of " +
                               std::to_string(request.chunk_tokens()) + " tokens are counted from position 0");
        }
    }
    return Refusal::none();
}

Refusal FrameRules::check_resume(const v1::StepFrame & frame, uint32_t hop_index, uint32_t n_hops) {
    const auto & resume_at = frame.resume_at();
    if (resume_at.empty()) {
        return Refusal::none();
    }
    if (auto refusal = check_rising(resume_at, n_hops); refusal.refused()) {
        return refusal;
    }
    const uint32_t own = resume_at[static_cast<int>(hop_index)];
    if (own != frame.position()) {
        return {v1::REFUSAL_BAD_REQUEST, "the first frame does not begin where resume_at says", frame.position(), own};
    }
    return Refusal::none();
}

}  // namespace meshnet
