// ShardEngine over llama.cpp: one model and one context, restricted to a range of layers by the patch stack.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "engine/shard_engine.h"
#include "ggml-cpu.h"
#include "llama-ext.h"
#include "llama-shard.h"
#include "llama.h"

namespace meshnet {

namespace {

constexpr uint32_t max_session_tokens = 131072;

// llama.cpp reports the cause of a failed load only in its log: keep the last errors for the status text.
class LogCapture {
  public:
    static LogCapture & instance() {
        static LogCapture capture;
        return capture;
    }

    std::string take() {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::exchange(errors_, {});
    }

  private:
    LogCapture() {
        llama_log_set(&LogCapture::on_log, this);
        llama_backend_init();
    }

    static void on_log(ggml_log_level level, const char * text, void * self) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            static_cast<LogCapture *>(self)->add(text);
        }
    }

    void add(std::string_view text) {
        std::lock_guard<std::mutex> lock(mutex_);
        while (!text.empty() && text.back() == '\n') {
            text.remove_suffix(1);
        }
        if (!text.empty() && errors_.size() < 2000) {
            errors_ += (errors_.empty() ? "" : "; ") + std::string(text);
        }
    }

    std::mutex mutex_;
    std::string errors_;
};

struct ModelFree {
    void operator()(llama_model * model) const {
        llama_model_free(model);
    }
};
struct ContextFree {
    void operator()(llama_context * context) const {
        llama_free(context);
    }
};
struct ThreadsFree {
    void operator()(ggml_threadpool * threads) const {
        ggml_threadpool_free(threads);
    }
};
using ModelPtr = std::unique_ptr<llama_model, ModelFree>;
using ContextPtr = std::unique_ptr<llama_context, ContextFree>;
using ThreadsPtr = std::unique_ptr<ggml_threadpool, ThreadsFree>;

// Types that a cache can be written in; others would abort in ggml.
constexpr std::array<ggml_type, 9> kv_types = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                               GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                                               GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};

Status parse_kv_type(const std::string & name, ggml_type & type) {
    std::string names;
    for (const ggml_type candidate : kv_types) {
        if (name == ggml_type_name(candidate)) {
            type = candidate;
            return Status::success();
        }
        names += (names.empty() ? "" : ", ") + std::string(ggml_type_name(candidate));
    }
    return {Code::invalid_argument, "no cache type '" + name + "'; choose from " + names};
}

// False if a value is infinite or not a number. Such a value in a recurrent state or cache would outlive its session.
bool all_finite(DType dtype, const std::vector<uint8_t> & bytes) {
    const auto none_has = [&](auto exponent) {
        decltype(exponent) bits = 0;
        bool finite = true;
        for (size_t i = 0; i + sizeof(bits) <= bytes.size(); i += sizeof(bits)) {
            std::memcpy(&bits, bytes.data() + i, sizeof(bits));
            finite &= (bits & exponent) != exponent;
        }
        return finite;
    };
    switch (dtype) {
    case DType::f32:
        return none_has(uint32_t{0x7f800000});
    case DType::f16:
        return none_has(uint16_t{0x7c00});
    case DType::bf16:
        return none_has(uint16_t{0x7f80});
    case DType::i32:
        break;
    }
    return true;
}

Status to_schema(const llama_shard_boundary & boundary, BoundarySchema & schema) {
    if (boundary.name.empty()) {
        return Status::success();
    }
    TensorSpec spec;
    spec.name = boundary.name;
    switch (boundary.type) {
    case GGML_TYPE_F32:
        spec.dtype = DType::f32;
        break;
    case GGML_TYPE_F16:
        spec.dtype = DType::f16;
        break;
    case GGML_TYPE_BF16:
        spec.dtype = DType::bf16;
        break;
    case GGML_TYPE_I32:
        spec.dtype = DType::i32;
        break;
    default:
        return {Code::illegal_cut, "boundary '" + boundary.name + "' has type " + ggml_type_name(boundary.type) +
                                       ", which the wire does not carry"};
    }
    size_t rank = 3;
    while (rank > 1 && boundary.ne[rank - 1] == 1) {
        --rank;
    }
    for (size_t i = 0; i < rank; ++i) {
        spec.shape.push_back(static_cast<uint32_t>(boundary.ne[i]));
    }
    schema.tensors.push_back(std::move(spec));
    return Status::success();
}

// What crosses the cut before layer k of a range that is legal itself, if it is legal on both sides.
Status probe_cut(llama_context * context, LayerRange layers, int32_t k, BoundarySchema & boundary) {
    const llama_shard_info before = llama_shard_probe(context, layers.start, k);
    if (!before.error.empty()) {
        return {Code::illegal_cut, before.error};
    }
    const llama_shard_info after = llama_shard_probe(context, k, layers.end);
    if (!after.error.empty()) {
        return {Code::illegal_cut, after.error};
    }
    BoundarySchema in;
    if (Status status = to_schema(before.out, boundary); !status.ok()) {
        return status;
    }
    if (Status status = to_schema(after.in, in); !status.ok()) {
        return status;
    }
    if (in.digest() != boundary.digest()) {
        return {Code::illegal_cut, "what the layers before it give is not what those after it take"};
    }
    return Status::success();
}

std::string token_text(const llama_vocab * vocab, llama_token token) {
    return token == LLAMA_TOKEN_NULL ? std::string() : std::string(llama_vocab_get_text(vocab, token));
}

llama_context_params context_params(const EngineConfig & config, ggml_type type_k, ggml_type type_v) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = config.session_tokens * config.sequences;
    params.n_batch = config.step_tokens;
    params.n_ubatch = config.step_tokens;
    params.n_seq_max = config.sequences;
    params.n_rs_seq = config.rollback_tokens;
    params.n_outputs_max = std::max(config.sequences, config.step_outputs);
    params.n_threads = config.threads;
    params.n_threads_batch = config.threads;
    params.flash_attn_type = config.flash_attention ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = type_k;
    params.type_v = type_v;
    params.swa_full = false;
    // Each sequence has its own cells: what a session computes does not depend on its neighbours.
    params.kv_unified = false;
    return params;
}

// The cores that the calling thread may run on.
class Affinity {
  public:
    Affinity() {
        CPU_ZERO(&cpus_);
        pthread_getaffinity_np(pthread_self(), sizeof(cpus_), &cpus_);
    }
    explicit Affinity(int cpu) {
        CPU_ZERO(&cpus_);
        CPU_SET(static_cast<size_t>(cpu), &cpus_);
    }

    int count() const {
        return CPU_COUNT(&cpus_);
    }
    bool has(int cpu) const {
        return CPU_ISSET(static_cast<size_t>(cpu), &cpus_);
    }
    // A hint: where it is not allowed, threads run where they may.
    void apply() const {
        pthread_setaffinity_np(pthread_self(), sizeof(cpus_), &cpus_);
    }

  private:
    cpu_set_t cpus_;
};

class LlamaEngine final : public ShardEngine {
  public:
    Status load(const EngineConfig & config);
    Status needs(const EngineConfig & config, RangeNeeds & needs);

    const EngineDescription & describe() const override {
        return description_;
    }
    void bind_thread() const override {
        if (compute_cpu_ >= 0) {
            Affinity(compute_cpu_).apply();
        }
    }
    Status open_sequence(int32_t & sequence) override;
    Status close_sequence(int32_t sequence) override;
    Status rollback(int32_t sequence, uint32_t position) override;
    Status execute(const std::vector<Step> & steps, std::vector<StepResult> & results) override;
    Status tokenize(std::string_view text, bool add_special, bool parse_special,
                    std::vector<int32_t> & tokens) const override;
    Status piece(int32_t token, std::string & bytes) const override;
    bool is_eog(int32_t token) const override;

  private:
    struct Sequence {
        bool open = false;
        bool broken = false;  // its cache is lost: only close_sequence() is left
        uint32_t cached = 0;
        uint32_t last_step = 0;  // tokens of the last step; 0 after a rollback
    };

    Status check_open(int32_t sequence) const;
    Status check(const std::vector<Step> & steps) const;
    Status prepare(const EngineConfig & config, EngineConfig & actual, ggml_type & type_k, ggml_type & type_v);
    Status probe(const EngineConfig & config, ggml_type type_k, ggml_type type_v);
    void forget(const std::vector<Step> & steps, bool untouched);

    EngineDescription description_;
    std::vector<std::string> globals_;
    ModelPtr model_;
    int compute_cpu_ = -1;  // the core of the thread that calls execute(), if ggml's own threads have one each
    ThreadsPtr threads_;    // outlives the context that uses it
    ContextPtr context_;
    llama_batch batch_{};
    const llama_vocab * vocab_ = nullptr;
    std::vector<Sequence> sequences_;
    std::vector<uint8_t> boundary_in_;
    std::vector<uint8_t> boundary_out_;

  public:
    ~LlamaEngine() override {
        if (batch_.token) {
            llama_batch_free(batch_);
        }
    }
};

// Dry run on metadata: is the range legal, what does it need, where could it be cut again?
Status LlamaEngine::probe(const EngineConfig & config, ggml_type type_k, ggml_type type_v) {
    llama_model_params model_params = llama_model_default_params();
    model_params.no_alloc = true;
    model_params.load_mode = LLAMA_LOAD_MODE_NONE;
    model_params.n_gpu_layers = 0;
    const ModelPtr model(llama_model_load_from_file(config.model_path.c_str(), model_params));
    if (!model) {
        return {Code::invalid_argument,
                "cannot read model '" + config.model_path + "': " + LogCapture::instance().take()};
    }
    // With the session's own length: some graphs read other weights in long contexts (rope factors). Nothing is
    // allocated, so that one sequence and short steps only save the time to build for more.
    EngineConfig small = config;
    small.sequences = 1;
    small.step_tokens = std::min({config.step_tokens, config.session_tokens, 512u});
    const ContextPtr context(llama_init_from_model(model.get(), context_params(small, type_k, type_v)));
    if (!context) {
        return {Code::invalid_argument,
                "cannot build the graph of '" + config.model_path + "': " + LogCapture::instance().take()};
    }

    if (llama_model_has_encoder(model.get()) || llama_model_is_diffusion(model.get()) ||
        !llama_get_memory(context.get())) {
        return {Code::illegal_cut, "'" + config.model_path + "' is not a model that generates token by token"};
    }
    const int32_t n_layer = llama_model_n_layer(model.get());
    const int32_t start = config.layers.start;
    const int32_t end = config.layers.end == 0 ? n_layer : config.layers.end;
    if (start < 0 || end <= start || end > n_layer) {
        return {Code::illegal_cut, "layers " + std::to_string(start) + ":" + std::to_string(end) +
                                       " are not a range of this model, which has " + std::to_string(n_layer)};
    }

    const llama_shard_info info = llama_shard_probe(context.get(), start, end);
    if (!info.error.empty()) {
        return {Code::illegal_cut, "layers " + std::to_string(start) + ":" + std::to_string(end) + " of '" +
                                       config.model_path + "' cannot be cut out: " + info.error};
    }
    for (int32_t k = start + 1; k < end && config.find_cuts; ++k) {
        BoundarySchema boundary;
        if (const Status status = probe_cut(context.get(), {start, end}, k, boundary); status.ok()) {
            description_.legal_cuts.push_back(static_cast<uint32_t>(k));
            description_.cut_boundaries.push_back(std::move(boundary));
        } else {
            description_.illegal_cuts.emplace_back(static_cast<uint32_t>(k), status.message);
        }
    }

    globals_ = info.globals;
    description_.n_layer = static_cast<uint32_t>(n_layer);
    description_.layers = {start, end};
    description_.needs_token_ids = info.needs_tokens;
    description_.weight_bytes = info.n_bytes;
    if (Status status = to_schema(info.in, description_.boundary_in); !status.ok()) {
        return status;
    }
    return to_schema(info.out, description_.boundary_out);
}

// Checks the configuration and probes the model; `actual` is the configuration with its defaults filled in.
Status LlamaEngine::prepare(const EngineConfig & config, EngineConfig & actual, ggml_type & type_k,
                            ggml_type & type_v) {
    LogCapture::instance().take();
    std::error_code error;
    if (!std::filesystem::is_regular_file(config.model_path, error)) {
        return {Code::not_found, "no model file at '" + config.model_path + "'"};
    }
    if (config.session_tokens == 0 || config.session_tokens > max_session_tokens) {
        return {Code::invalid_argument, "a session holds 1 to " + std::to_string(max_session_tokens) + " tokens, not " +
                                            std::to_string(config.session_tokens)};
    }
    if (config.sequences == 0 || config.sequences > llama_max_parallel_sequences()) {
        return {Code::invalid_argument, "1 to " + std::to_string(llama_max_parallel_sequences()) + " sequences, not " +
                                            std::to_string(config.sequences)};
    }
    if (config.step_tokens == 0 || config.step_outputs == 0) {
        return {Code::invalid_argument, "a step needs at least one token and one output"};
    }
    if (Status status = parse_kv_type(config.kv_type_k, type_k); !status.ok()) {
        return status;
    }
    if (Status status = parse_kv_type(config.kv_type_v, type_v); !status.ok()) {
        return status;
    }
    actual = config;
    if (actual.threads <= 0) {
        actual.threads = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
    }
    actual.step_tokens = std::min(actual.step_tokens, actual.session_tokens);
    return probe(actual, type_k, type_v);
}

Status LlamaEngine::needs(const EngineConfig & config, RangeNeeds & needs) {
    EngineConfig actual;
    ggml_type type_k;
    ggml_type type_v;
    EngineConfig quick = config;
    quick.find_cuts = false;
    if (Status status = prepare(quick, actual, type_k, type_v); !status.ok()) {
        return status;
    }
    needs = {description_.n_layer, description_.layers, globals_};
    return Status::success();
}

Status LlamaEngine::load(const EngineConfig & config) {
    LogCapture & log = LogCapture::instance();
    EngineConfig actual;
    ggml_type type_k;
    ggml_type type_v;
    if (Status status = prepare(config, actual, type_k, type_v); !status.ok()) {
        return status;
    }

    std::vector<const char *> globals;
    for (const std::string & name : globals_) {
        globals.push_back(name.c_str());
    }
    globals.push_back(nullptr);

    llama_model_params model_params = llama_model_default_params();
    const bool copies = description_.weight_bytes <= config.most_copied_bytes;
    model_params.load_mode = copies ? LLAMA_LOAD_MODE_NONE : LLAMA_LOAD_MODE_MMAP;
    model_params.progress_callback = [](float, void *) { return true; };
    if (!description_.is_head() || !description_.is_tail()) {
        model_params.shard_start = description_.layers.start;
        model_params.shard_end = description_.layers.end;
        model_params.shard_globals = globals.data();
    }
    model_.reset(llama_model_load_from_file(config.model_path.c_str(), model_params));
    if (!model_) {
        return {Code::engine_failure, "cannot load '" + config.model_path + "': " + log.take()};
    }
    context_.reset(llama_init_from_model(model_.get(), context_params(actual, type_k, type_v)));
    if (!context_) {
        return {Code::engine_failure, "no context for '" + config.model_path + "': " + log.take()};
    }
    // Threads that stay, instead of new ones for every step; and that sleep between steps, instead of taking a core
    // from the other shards of this machine while those compute.
    ggml_threadpool_params threads = ggml_threadpool_params_default(actual.threads);
    threads.poll = 0;
    // With a thread for every core each one has its own: else the scheduler now and then wakes two of them on one core,
    // and they wait for each other at every barrier until it notices.
    const Affinity everywhere;
    if (actual.threads > 1 && actual.threads == everywhere.count()) {
        threads.strict_cpu = true;
        for (int cpu = 0; cpu < std::min<int>(CPU_SETSIZE, GGML_MAX_N_THREADS); ++cpu) {
            threads.cpumask[cpu] = everywhere.has(cpu);
            compute_cpu_ = everywhere.has(cpu) ? cpu : compute_cpu_;
        }
    }
    threads_.reset(ggml_threadpool_new(&threads));
    everywhere.apply();  // this thread computes nothing later
    llama_attach_threadpool(context_.get(), threads_.get(), nullptr);

    vocab_ = llama_model_get_vocab(model_.get());
    sequences_.resize(actual.sequences);
    batch_ = llama_batch_init(static_cast<int32_t>(actual.step_tokens), 0, 1);

    EngineDescription & d = description_;
    d.engine = "llama";
    std::array<char, 256> text{};
    llama_model_meta_val_str(model_.get(), "general.architecture", text.data(), text.size());
    d.architecture = text.data();
    if (llama_model_meta_val_str(model_.get(), "general.name", text.data(), text.size()) > 0) {
        d.model_name = text.data();
    }
    d.n_vocab = static_cast<uint32_t>(llama_vocab_n_tokens(vocab_));
    d.n_ctx_train = static_cast<uint32_t>(llama_model_n_ctx_train(model_.get()));
    d.session_tokens = std::min(actual.session_tokens, llama_n_ctx_seq(context_.get()));
    d.sequences = actual.sequences;
    d.step_tokens = actual.step_tokens;
    d.step_outputs = actual.step_outputs;
    // A cache of another type computes other numbers: all hops of a route, and its replicas, must agree on it.
    d.compatibility_id =
        std::string(MESHNET_COMPATIBILITY_ID) + "+kv:" + ggml_type_name(type_k) + "/" + ggml_type_name(type_v);
    d.build_id = MESHNET_BUILD_ID;
    if (const char * source = llama_model_chat_template(model_.get(), nullptr)) {
        d.chat_template = source;
    }
    d.bos_token = token_text(vocab_, llama_vocab_bos(vocab_));
    d.eos_token = token_text(vocab_, llama_vocab_eos(vocab_));
    d.add_bos = llama_vocab_get_add_bos(vocab_);
    // Recurrent states and sliding windows forget: only a cache of all positions can return to any of them.
    d.can_rollback = !llama_model_is_recurrent(model_.get()) && !llama_model_is_hybrid(model_.get()) &&
                     llama_model_n_swa(model_.get()) == 0;
    for (const auto & [buffer_type, bytes] : llama_get_memory_breakdown(context_.get())) {
        d.kv_bytes += bytes.context;
        d.compute_bytes += bytes.compute;
        // Weights that are used as they are in the file are in memory once, however often they are mapped.
        const bool mapped = std::string_view(ggml_backend_buft_name(buffer_type)) == "CPU_Mapped";
        d.copied_bytes += mapped ? 0 : bytes.model;
    }
    d.kv_bytes_per_token = d.kv_bytes / llama_n_ctx(context_.get());
    return Status::success();
}

Status LlamaEngine::check_open(int32_t sequence) const {
    if (sequence < 0 || static_cast<size_t>(sequence) >= sequences_.size() || !sequences_[sequence].open) {
        return {Code::not_found, "sequence " + std::to_string(sequence) + " is not open"};
    }
    return Status::success();
}

Status LlamaEngine::open_sequence(int32_t & sequence) {
    for (size_t i = 0; i < sequences_.size(); ++i) {
        if (!sequences_[i].open) {
            sequences_[i] = {};
            sequences_[i].open = true;
            sequence = static_cast<int32_t>(i);
            return Status::success();
        }
    }
    return {Code::resource_exhausted, "all " + std::to_string(sequences_.size()) + " sequence slots are taken"};
}

Status LlamaEngine::close_sequence(int32_t sequence) {
    if (Status status = check_open(sequence); !status.ok()) {
        return status;
    }
    llama_memory_seq_rm(llama_get_memory(context_.get()), sequence, -1, -1);
    sequences_[sequence] = {};
    return Status::success();
}

Status LlamaEngine::rollback(int32_t sequence, uint32_t position) {
    if (Status status = check_open(sequence); !status.ok()) {
        return status;
    }
    Sequence & state = sequences_[sequence];
    if (position > state.cached) {
        return {Code::failed_precondition, "cannot roll back to position " + std::to_string(position) + ": only " +
                                               std::to_string(state.cached) + " tokens are cached"};
    }
    if (position == state.cached && !state.broken) {
        return Status::success();
    }
    llama_memory_t memory = llama_get_memory(context_.get());
    if (position == 0) {
        llama_memory_seq_rm(memory, sequence, -1, -1);
        state = {};
        state.open = true;
        return Status::success();
    }
    // A sliding window that has dropped positions which the earlier tokens saw cannot come back.
    const llama_pos oldest = llama_memory_seq_pos_min(memory, sequence);
    const int64_t window = llama_model_n_swa(model_.get());
    const bool window_lost = window > 0 && oldest > 0 && oldest + window > static_cast<int64_t>(position);
    // Snapshots of recurrent state are those of the last step's tokens, whatever llama.cpp says about older ones.
    const bool snapshot_lost = llama_n_rs_seq(context_.get()) > 0 && state.cached - position >= state.last_step;
    if (state.broken || window_lost || snapshot_lost ||
        !llama_memory_seq_rm(memory, sequence, static_cast<llama_pos>(position), -1)) {
        return {Code::no_rollback, "this model's cache cannot return from position " + std::to_string(state.cached) +
                                       " to " + std::to_string(position) + "; prefill again from 0"};
    }
    state.last_step = 0;
    state.cached = position;
    return Status::success();
}

Status LlamaEngine::check(const std::vector<Step> & steps) const {
    const EngineDescription & d = description_;
    size_t n_tokens = 0;
    size_t n_outputs = 0;
    std::unordered_set<int32_t> seen;
    for (const Step & step : steps) {
        if (Status status = check_open(step.sequence); !status.ok()) {
            return status;
        }
        const Sequence & state = sequences_[step.sequence];
        if (!seen.insert(step.sequence).second) {
            return {Code::invalid_argument, "two steps of sequence " + std::to_string(step.sequence)};
        }
        if (state.broken || step.position != state.cached) {
            return {Code::failed_precondition,
                    "step at position " + std::to_string(step.position) + ", but " +
                        (state.broken ? "the cache is lost" : std::to_string(state.cached) + " tokens are cached")};
        }
        if (step.tokens.empty()) {
            return {Code::invalid_argument, "a step without tokens"};
        }
        if (step.tokens.size() > d.session_tokens - state.cached) {
            return {Code::resource_exhausted, std::to_string(state.cached + step.tokens.size()) +
                                                  " tokens exceed the session's " + std::to_string(d.session_tokens)};
        }
        for (const int32_t token : step.tokens) {
            if (token < 0 || static_cast<uint32_t>(token) >= d.n_vocab) {
                return {Code::invalid_argument,
                        "no token " + std::to_string(token) + " in a vocabulary of " + std::to_string(d.n_vocab)};
            }
        }
        if (step.boundary.size() != d.boundary_in.tensors.size()) {
            return {Code::invalid_argument, "a step needs " + std::to_string(d.boundary_in.tensors.size()) +
                                                " boundary tensors, got " + std::to_string(step.boundary.size())};
        }
        for (size_t i = 0; i < step.boundary.size(); ++i) {
            const TensorSpec & spec = d.boundary_in.tensors[i];
            const TensorData & data = step.boundary[i];
            if (data.name != spec.name) {
                return {Code::invalid_argument, "boundary '" + data.name + "' instead of '" + spec.name + "'"};
            }
            if (data.bytes.size() != spec.bytes_per_token() * step.tokens.size()) {
                return {Code::invalid_argument, "boundary '" + spec.name + "' has " +
                                                    std::to_string(data.bytes.size()) + " bytes for " +
                                                    std::to_string(step.tokens.size()) + " tokens"};
            }
            if (!all_finite(spec.dtype, data.bytes)) {
                return {Code::invalid_argument, "boundary '" + spec.name + "' has values that are not finite"};
            }
        }
        if (!step.logits_at.empty() && !d.is_tail()) {
            return {Code::invalid_argument, "only the tail has logits"};
        }
        if (!std::is_sorted(step.logits_at.begin(), step.logits_at.end()) ||
            std::adjacent_find(step.logits_at.begin(), step.logits_at.end()) != step.logits_at.end() ||
            (!step.logits_at.empty() && step.logits_at.back() >= step.tokens.size())) {
            return {Code::invalid_argument, "logits_at must be rising indices into the step's tokens"};
        }
        n_tokens += step.tokens.size();
        n_outputs += step.logits_at.size();
    }
    if (n_tokens > d.step_tokens || n_outputs > d.step_outputs) {
        return {Code::invalid_argument, std::to_string(n_tokens) + " tokens and " + std::to_string(n_outputs) +
                                            " outputs in one batch; at most " + std::to_string(d.step_tokens) +
                                            " and " + std::to_string(d.step_outputs)};
    }
    return Status::success();
}

// After a failed decode: back to where the steps began, or the cache is lost.
void LlamaEngine::forget(const std::vector<Step> & steps, bool untouched) {
    llama_memory_t memory = llama_get_memory(context_.get());
    for (const Step & step : steps) {
        const llama_pos first = step.position == 0 ? -1 : static_cast<llama_pos>(step.position);
        // Snapshots may be half written, and removing would take one of them for the state at `first`.
        const bool lost = !untouched && step.position > 0 && llama_n_rs_seq(context_.get()) > 0;
        sequences_[step.sequence].broken = lost || !llama_memory_seq_rm(memory, step.sequence, first, -1);
    }
}

Status LlamaEngine::execute(const std::vector<Step> & steps, std::vector<StepResult> & results) {
    results.assign(steps.size(), {});
    if (steps.empty()) {
        return Status::success();
    }
    if (Status status = check(steps); !status.ok()) {
        return status;
    }

    const size_t in_row = description_.boundary_in.bytes_per_token();
    const size_t out_row = description_.boundary_out.bytes_per_token();
    boundary_in_.clear();
    batch_.n_tokens = 0;
    for (const Step & step : steps) {
        for (size_t i = 0; i < step.tokens.size(); ++i) {
            const int32_t k = batch_.n_tokens++;
            batch_.token[k] = step.tokens[i];
            batch_.pos[k] = static_cast<llama_pos>(step.position + i);
            batch_.n_seq_id[k] = 1;
            batch_.seq_id[k][0] = step.sequence;
            batch_.logits[k] = std::binary_search(step.logits_at.begin(), step.logits_at.end(), i);
        }
        if (in_row > 0) {
            const std::vector<uint8_t> & bytes = step.boundary.front().bytes;
            boundary_in_.insert(boundary_in_.end(), bytes.begin(), bytes.end());
        }
    }
    const size_t n_tokens = static_cast<size_t>(batch_.n_tokens);
    boundary_out_.resize(out_row * n_tokens);

    llama_shard_set_io(context_.get(), boundary_in_.data(), in_row * n_tokens, boundary_out_.data(),
                       boundary_out_.size());
    int32_t code = -3;
    std::string error;
    try {
        code = llama_decode(context_.get(), batch_);
    } catch (const std::exception & e) {
        error = e.what();
    }
    if (code != 0) {
        const bool no_room = code == 1;
        const bool refused = code == -1;
        forget(steps, no_room || refused);
        return {no_room ? Code::resource_exhausted : Code::engine_failure,
                "llama_decode returned " + std::to_string(code) + ": " + error + LogCapture::instance().take()};
    }

    size_t row = 0;
    for (size_t s = 0; s < steps.size(); ++s) {
        const Step & step = steps[s];
        Sequence & state = sequences_[step.sequence];
        state.last_step = static_cast<uint32_t>(step.tokens.size());
        state.cached += state.last_step;
        if (out_row > 0) {
            const uint8_t * first = boundary_out_.data() + row * out_row;
            results[s].boundary.push_back({description_.boundary_out.tensors.front().name,
                                           std::vector<uint8_t>(first, first + step.tokens.size() * out_row)});
        }
        for (const uint32_t i : step.logits_at) {
            const float * logits = llama_get_logits_ith(context_.get(), static_cast<int32_t>(row + i));
            if (!logits) {
                return {Code::engine_failure, "no logits for token " + std::to_string(i)};
            }
            results[s].logits.emplace_back(logits, logits + description_.n_vocab);
        }
        row += step.tokens.size();
    }
    return Status::success();
}

Status LlamaEngine::tokenize(std::string_view text, bool add_special, bool parse_special,
                             std::vector<int32_t> & tokens) const {
    tokens.resize(text.size() + 2);
    int32_t n = llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                               static_cast<int32_t>(tokens.size()), add_special, parse_special);
    if (n < 0) {
        tokens.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
        n = llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                           static_cast<int32_t>(tokens.size()), add_special, parse_special);
    }
    if (n < 0) {
        tokens.clear();
        return {Code::engine_failure, "the text cannot be tokenized"};
    }
    tokens.resize(static_cast<size_t>(n));
    return Status::success();
}

Status LlamaEngine::piece(int32_t token, std::string & bytes) const {
    if (token < 0 || static_cast<uint32_t>(token) >= description_.n_vocab) {
        return {Code::invalid_argument, "no token " + std::to_string(token)};
    }
    bytes.resize(64);
    int32_t n = llama_token_to_piece(vocab_, token, bytes.data(), static_cast<int32_t>(bytes.size()), 0, false);
    if (n < 0) {
        bytes.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab_, token, bytes.data(), static_cast<int32_t>(bytes.size()), 0, false);
    }
    bytes.resize(static_cast<size_t>(std::max(n, 0)));
    return Status::success();
}

bool LlamaEngine::is_eog(int32_t token) const {
    return llama_vocab_is_eog(vocab_, token);
}

}  // namespace

Status make_llama_engine(const EngineConfig & config, std::unique_ptr<ShardEngine> & engine) {
    engine.reset();
    try {
        auto loaded = std::make_unique<LlamaEngine>();
        if (Status status = loaded->load(config); !status.ok()) {
            return status;
        }
        engine = std::move(loaded);
        return Status::success();
    } catch (const std::exception & e) {
        return {Code::engine_failure, "cannot load '" + config.model_path + "': " + e.what()};
    }
}

Status llama_range_needs(const EngineConfig & config, RangeNeeds & needs) {
    try {
        return LlamaEngine().needs(config, needs);
    } catch (const std::exception & e) {
        return {Code::engine_failure, "cannot read '" + config.model_path + "': " + e.what()};
    }
}

}  // namespace meshnet
