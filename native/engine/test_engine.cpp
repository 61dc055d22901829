// A deterministic engine for tests of everything around an engine. It has no weights: a token's state is one 64-bit
// word, and each layer mixes into it the layer's index, the position and the layer's own memory of all earlier
// tokens (its "Hot KV"). So a missing layer, a wrong order, a wrong token, position or stale cache changes the output,
// while any split of the layers gives the same.
//
// The word crosses a cut as 16 floats of 4 bits each (tensor "state"), and with two boundary tensors also as two i32
// (tensor "check"), which must agree with it.
#include "engine/shard_engine.h"

#include <chrono>
#include <cstring>

namespace meshnet {
namespace {

constexpr int32_t n_bytes = 256;
constexpr int32_t bos = 256;
constexpr int32_t eos = 257;
constexpr int32_t n_vocab = 258;
constexpr uint32_t n_ctx_train = 131072;
constexpr size_t state_floats = 16;
constexpr std::string_view bos_text = "<bos>";
constexpr std::string_view eos_text = "<eos>";

uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    x ^= x >> 31;
    return x;
}

// What the model would say after a token: a spread over printable bytes, and the end now and then.
std::vector<float> logits_of(uint64_t state) {
    std::vector<float> logits(n_vocab, -20.0f);
    for (int32_t token = 0; token < n_bytes; ++token) {
        if (token == '\n' || (token >= 32 && token < 127)) {
            logits[token] = static_cast<float>(mix(state ^ mix(token + 1)) & 0xffff) / 8192.0f;  // [0, 8)
        }
    }
    logits[bos] = -30.0f;
    logits[eos] = mix(state + 0x656f73) % 48 == 0 ? 12.0f : -4.0f;
    return logits;
}

void encode_state(uint64_t state, float * out) {
    for (size_t i = 0; i < state_floats; ++i) {
        out[i] = static_cast<float>((state >> (4 * i)) & 15);
    }
}

// False if the floats are not sixteen whole numbers in [0, 16).
bool decode_state(const float * in, uint64_t & state) {
    state = 0;
    for (size_t i = 0; i < state_floats; ++i) {
        if (!(in[i] >= 0.0f && in[i] < 16.0f)) {
            return false;
        }
        state |= static_cast<uint64_t>(in[i]) << (4 * i);
    }
    return true;
}

void spin_us(uint64_t us) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
    while (std::chrono::steady_clock::now() < until) {
    }
}

class TestEngine final : public ShardEngine {
  public:
    TestEngine(const EngineConfig & config, int32_t n_layer, uint64_t us_per_layer_token, int boundary_tensors)
        : us_per_layer_token_(us_per_layer_token), slots_(config.sequences) {
        auto & d = description_;
        d.engine = "test";
        d.architecture = "test";
        d.model_name = "test-" + std::to_string(n_layer);
        d.n_layer = static_cast<uint32_t>(n_layer);
        d.n_vocab = n_vocab;
        d.n_ctx_train = n_ctx_train;
        d.layers = config.layers;
        if (!d.is_head()) {
            d.boundary_in = schema(boundary_tensors);
        }
        if (!d.is_tail()) {
            d.boundary_out = schema(boundary_tensors);
        }
        d.needs_token_ids = true;
        for (int32_t cut = d.layers.start + 1; cut < d.layers.end && config.find_cuts; ++cut) {
            d.legal_cuts.push_back(static_cast<uint32_t>(cut));
            d.cut_boundaries.push_back(schema(boundary_tensors));
        }
        d.session_tokens = config.session_tokens;
        d.sequences = config.sequences;
        d.step_tokens = config.step_tokens;
        d.kv_bytes_per_token = layer_count() * sizeof(uint64_t);
        d.kv_bytes = d.kv_bytes_per_token * d.session_tokens * d.sequences;
        d.compatibility_id = MESHNET_COMPATIBILITY_ID;
        d.build_id = MESHNET_BUILD_ID;
        d.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
                          "{% if add_generation_prompt %}[assistant] {% endif %}";
        d.bos_token = bos_text;
        d.eos_token = eos_text;
        d.add_bos = true;
        d.can_rollback = true;
    }

    const EngineDescription & describe() const override {
        return description_;
    }

    Status open_sequence(int32_t & sequence) override {
        for (size_t i = 0; i < slots_.size(); ++i) {
            if (!slots_[i].open) {
                slots_[i] = Slot{true, std::vector<std::vector<uint64_t>>(layer_count())};
                sequence = static_cast<int32_t>(i);
                return Status::success();
            }
        }
        return {Code::resource_exhausted, "all " + std::to_string(slots_.size()) + " sequences are in use"};
    }

    Status close_sequence(int32_t sequence) override {
        if (!is_open(sequence)) {
            return unknown(sequence);
        }
        slots_[sequence] = Slot{};
        return Status::success();
    }

    Status rollback(int32_t sequence, uint32_t position) override {
        if (!is_open(sequence)) {
            return unknown(sequence);
        }
        if (position > slots_[sequence].cached()) {
            return {Code::failed_precondition, "cannot roll forward to " + std::to_string(position)};
        }
        for (auto & layer : slots_[sequence].memory) {
            layer.resize(position);
        }
        return Status::success();
    }

    Status execute(const std::vector<Step> & steps, std::vector<StepResult> & results) override {
        uint64_t n_tokens = 0;
        for (const auto & step : steps) {
            if (auto status = check(step); !status.ok()) {
                return status;
            }
            n_tokens += step.tokens.size();
        }
        if (n_tokens > description_.step_tokens) {
            return {Code::invalid_argument, std::to_string(n_tokens) + " tokens in one step; at most " +
                                                std::to_string(description_.step_tokens)};
        }
        results.clear();
        for (const auto & step : steps) {
            results.emplace_back();
            compute(step, results.back());
        }
        spin_us(us_per_layer_token_ * n_tokens * layer_count());
        return Status::success();
    }

    Status tokenize(std::string_view text, bool add_special, bool parse_special,
                    std::vector<int32_t> & tokens) const override {
        tokens.clear();
        if (add_special) {
            tokens.push_back(bos);
        }
        while (!text.empty()) {
            if (parse_special && text.substr(0, bos_text.size()) == bos_text) {
                tokens.push_back(bos);
                text.remove_prefix(bos_text.size());
            } else if (parse_special && text.substr(0, eos_text.size()) == eos_text) {
                tokens.push_back(eos);
                text.remove_prefix(eos_text.size());
            } else {
                tokens.push_back(static_cast<unsigned char>(text.front()));
                text.remove_prefix(1);
            }
        }
        return Status::success();
    }

    Status piece(int32_t token, std::string & bytes) const override {
        if (token < 0 || token >= n_vocab) {
            return {Code::invalid_argument, "token " + std::to_string(token) + " is not in the vocabulary"};
        }
        bytes = token < n_bytes ? std::string(1, static_cast<char>(token)) : std::string();
        return Status::success();
    }

    bool is_eog(int32_t token) const override {
        return token == eos;
    }

  private:
    struct Slot {
        bool open = false;
        std::vector<std::vector<uint64_t>> memory;  // per owned layer, one word per cached position

        uint32_t cached() const {
            return memory.empty() ? 0 : static_cast<uint32_t>(memory.front().size());
        }
    };

    static BoundarySchema schema(int boundary_tensors) {
        BoundarySchema schema;
        schema.tensors.push_back({"state", DType::f32, {state_floats}});
        if (boundary_tensors == 2) {
            schema.tensors.push_back({"check", DType::i32, {2}});
        }
        return schema;
    }

    size_t layer_count() const {
        return static_cast<size_t>(description_.layers.end - description_.layers.start);
    }

    bool is_open(int32_t sequence) const {
        return sequence >= 0 && static_cast<size_t>(sequence) < slots_.size() && slots_[sequence].open;
    }

    static Status unknown(int32_t sequence) {
        return {Code::not_found, "sequence " + std::to_string(sequence) + " is not open"};
    }

    Status check(const Step & step) const {
        if (!is_open(step.sequence)) {
            return unknown(step.sequence);
        }
        const uint32_t cached = slots_[step.sequence].cached();
        if (step.position != cached) {
            return {Code::failed_precondition, "position " + std::to_string(step.position) +
                                                   " does not follow the cache of " + std::to_string(cached)};
        }
        if (step.tokens.empty() || step.tokens.size() > description_.session_tokens - cached) {
            return {Code::resource_exhausted, std::to_string(step.tokens.size()) + " tokens do not fit the cache of " +
                                                  std::to_string(description_.session_tokens)};
        }
        for (const int32_t token : step.tokens) {
            if (token < 0 || token >= n_vocab) {
                return {Code::invalid_argument, "token " + std::to_string(token) + " is not in the vocabulary"};
            }
        }
        const auto & tensors = description_.boundary_in.tensors;
        if (step.boundary.size() != tensors.size()) {
            return {Code::invalid_argument, "the boundary has " + std::to_string(tensors.size()) + " tensors"};
        }
        for (size_t i = 0; i < tensors.size(); ++i) {
            if (step.boundary[i].name != tensors[i].name ||
                step.boundary[i].bytes.size() != step.tokens.size() * tensors[i].bytes_per_token()) {
                return {Code::invalid_argument, "boundary tensor " + tensors[i].name + " has the wrong name or size"};
            }
        }
        for (size_t t = 0; t < step.tokens.size() && !tensors.empty(); ++t) {
            uint64_t state = 0;
            if (!read_boundary(step, t, state)) {
                return {Code::invalid_argument, "boundary of token " + std::to_string(t) + " is no state"};
            }
        }
        for (const uint32_t index : step.logits_at) {
            if (index >= step.tokens.size() || !description_.is_tail()) {
                return {Code::invalid_argument, "no logits for index " + std::to_string(index)};
            }
        }
        return Status::success();
    }

    bool read_boundary(const Step & step, size_t t, uint64_t & state) const {
        float values[state_floats];
        std::memcpy(values, step.boundary[0].bytes.data() + t * sizeof(values), sizeof(values));
        if (!decode_state(values, state)) {
            return false;
        }
        uint64_t check = state;
        if (step.boundary.size() == 2) {
            std::memcpy(&check, step.boundary[1].bytes.data() + t * sizeof(check), sizeof(check));
        }
        return check == state;
    }

    void compute(const Step & step, StepResult & result) {
        const size_t n = step.tokens.size();
        for (const auto & tensor : description_.boundary_out.tensors) {
            result.boundary.push_back({tensor.name, std::vector<uint8_t>(n * tensor.bytes_per_token())});
        }
        std::vector<uint64_t> states(n);
        auto & memory = slots_[step.sequence].memory;
        for (size_t t = 0; t < n; ++t) {
            const uint64_t position = step.position + t;
            uint64_t state = mix(static_cast<uint64_t>(step.tokens[t]) + 1);
            if (!description_.is_head()) {
                read_boundary(step, t, state);
            }
            for (size_t l = 0; l < memory.size(); ++l) {
                const uint64_t layer = static_cast<uint64_t>(description_.layers.start) + l;
                const uint64_t past = memory[l].empty() ? 0 : memory[l].back();
                memory[l].push_back(mix(past ^ mix(state + layer)));
                state = mix(state ^ memory[l].back() ^ mix(position * 0x9e3779b97f4a7c15ULL + layer));
            }
            states[t] = state;
            if (!result.boundary.empty()) {
                float values[state_floats];
                encode_state(state, values);
                std::memcpy(result.boundary[0].bytes.data() + t * sizeof(values), values, sizeof(values));
            }
            if (result.boundary.size() == 2) {
                std::memcpy(result.boundary[1].bytes.data() + t * sizeof(state), &state, sizeof(state));
            }
        }
        for (const uint32_t index : step.logits_at) {
            result.logits.push_back(logits_of(states[index]));
        }
    }

    EngineDescription description_;
    uint64_t us_per_layer_token_;
    std::vector<Slot> slots_;
};

// Reads "test[:<n_layer>[:<us_per_layer_token>[:<boundary_tensors>]]]".
bool parse_path(const std::string & path, uint64_t (&numbers)[3]) {
    if (path.empty() || path == "test") {
        return true;
    }
    if (path.compare(0, 5, "test:") != 0) {
        return false;
    }
    size_t at = 5;
    for (size_t i = 0; i < 3; ++i) {
        const size_t end = std::min(path.find(':', at), path.size());
        const std::string digits = path.substr(at, end - at);
        if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) {
            return false;
        }
        numbers[i] = std::stoull(digits);
        if (end == path.size()) {
            return true;
        }
        at = end + 1;
    }
    return false;
}

}  // namespace

Status make_test_engine(const EngineConfig & config, std::unique_ptr<ShardEngine> & engine) {
    engine.reset();
    uint64_t numbers[3] = {8, 0, 1};
    if (!parse_path(config.model_path, numbers) || numbers[0] < 1 || numbers[0] > 1000 || numbers[2] < 1 ||
        numbers[2] > 2) {
        return {Code::invalid_argument, "test model '" + config.model_path +
                                            "' is not test:<layers>[:<us per layer and token>[:<1 or 2 tensors>]]"};
    }
    EngineConfig resolved = config;
    const auto n_layer = static_cast<int32_t>(numbers[0]);
    if (resolved.layers.end == 0) {
        resolved.layers.end = n_layer;
    }
    if (resolved.layers.start < 0 || resolved.layers.start >= resolved.layers.end || resolved.layers.end > n_layer) {
        return {Code::illegal_cut, "layers " + std::to_string(resolved.layers.start) + ":" +
                                       std::to_string(resolved.layers.end) +
                                       " are not a range of 0:" + std::to_string(n_layer)};
    }
    if (resolved.session_tokens < 1 || resolved.sequences < 1 || resolved.step_tokens < 1) {
        return {Code::invalid_argument, "session tokens, sequences and step tokens must be at least 1"};
    }
    engine = std::make_unique<TestEngine>(resolved, n_layer, numbers[1], static_cast<int>(numbers[2]));
    return Status::success();
}

}  // namespace meshnet
