#include "tests/worker_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "worker/prefix.h"

namespace meshnet::test {
namespace {

constexpr char artifact[] = "sha256:test";

std::chrono::system_clock::time_point call_deadline() {
    return std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms);
}

}  // namespace

std::unique_ptr<ShardEngine> make_engine(const std::string & model, LayerRange layers, uint32_t session_tokens,
                                         uint32_t sequences, uint32_t step_tokens) {
    EngineConfig config;
    config.model_path = model;
    config.layers = layers;
    config.session_tokens = session_tokens;
    config.sequences = sequences;
    config.step_tokens = step_tokens;
    std::unique_ptr<ShardEngine> engine;
    const auto status = make_test_engine(config, engine);
    EXPECT_TRUE(status.ok()) << status.message;
    return engine;
}

bool eventually(const std::function<bool()> & condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > until) {
            return false;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

// --------------------------------------------------------------------------------------------- ControlledEngine

void ControlledEngine::Control::set(const std::function<void(Control &)> & change) {
    std::lock_guard lock(mutex);
    change(*this);
}

void ControlledEngine::Control::hold() {
    std::lock_guard lock(mutex);
    held = true;
}

void ControlledEngine::Control::release() {
    std::lock_guard lock(mutex);
    held = false;
    vocabulary_held = false;
    changed.notify_all();
}

void ControlledEngine::Control::pass(uint32_t n) {
    std::lock_guard lock(mutex);
    passes += n;
    changed.notify_all();
}

bool ControlledEngine::Control::wait_held() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::milliseconds(deadline_ms), [&] { return waiting > 0 && passes == 0; });
}

uint64_t ControlledEngine::Control::executed_steps() {
    std::lock_guard lock(mutex);
    return executed;
}

std::vector<ControlledEngine::StepShape> ControlledEngine::Control::taken_steps() {
    std::lock_guard lock(mutex);
    return steps;
}

ControlledEngine::ControlledEngine(std::unique_ptr<ShardEngine> inner, std::shared_ptr<Control> control)
    : inner_(std::move(inner)), control_(std::move(control)) {}

const EngineDescription & ControlledEngine::describe() const {
    return inner_->describe();
}

Status ControlledEngine::open_sequence(int32_t & sequence) {
    return inner_->open_sequence(sequence);
}

Status ControlledEngine::close_sequence(int32_t sequence) {
    return inner_->close_sequence(sequence);
}

Status ControlledEngine::rollback(int32_t sequence, uint32_t position) {
    {
        std::lock_guard lock(control_->mutex);
        if (control_->no_rollback) {
            return {Code::no_rollback, "this model cannot go back"};
        }
    }
    return inner_->rollback(sequence, position);
}

Status ControlledEngine::execute(const std::vector<Step> & steps, std::vector<StepResult> & results) {
    std::unique_lock lock(control_->mutex);
    ++control_->waiting;
    control_->changed.notify_all();
    control_->changed.wait(lock, [&] { return !control_->held || control_->passes > 0; });
    --control_->waiting;
    if (control_->held) {
        --control_->passes;
    }
    ++control_->executed;
    for (const auto & step : steps) {
        control_->steps.push_back({step.position, step.tokens.size()});
    }
    if (control_->throws) {
        throw std::runtime_error("thrown on purpose");
    }
    if (!control_->failure.ok()) {
        return control_->failure;
    }
    lock.unlock();
    return inner_->execute(steps, results);
}

Status ControlledEngine::tokenize(std::string_view text, bool add_special, bool parse_special,
                                  std::vector<int32_t> & tokens) const {
    {
        std::unique_lock lock(control_->mutex);
        ++control_->vocabulary_waiting;
        control_->changed.notify_all();
        control_->changed.wait(lock, [&] { return !control_->vocabulary_held; });
        --control_->vocabulary_waiting;
    }
    return inner_->tokenize(text, add_special, parse_special, tokens);
}

Status ControlledEngine::piece(int32_t token, std::string & bytes) const {
    return inner_->piece(token, bytes);
}

bool ControlledEngine::is_eog(int32_t token) const {
    return inner_->is_eog(token);
}

// ------------------------------------------------------------------------------------------------------ clients

std::string Outcome::text() const {
    std::string text;
    for (const auto & token : tokens) {
        text += token.piece();
    }
    return text;
}

std::vector<uint32_t> Outcome::ids() const {
    std::vector<uint32_t> ids;
    for (const auto & token : tokens) {
        ids.push_back(token.token());
    }
    return ids;
}

v1::RefusalDetail refusal_in(const grpc::ClientContext & context) {
    v1::RefusalDetail detail;
    const auto & trailing = context.GetServerTrailingMetadata();
    if (const auto it = trailing.find(refusal_metadata); it != trailing.end()) {
        EXPECT_TRUE(detail.ParseFromArray(it->second.data(), static_cast<int>(it->second.size())));
    }
    return detail;
}

HopClient::HopClient(const std::string & address)
    : stub_(v1::Shard::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {}

v1::DescribeResponse HopClient::describe() const {
    grpc::ClientContext context;
    context.set_deadline(call_deadline());
    v1::DescribeResponse response;
    EXPECT_TRUE(stub_->Describe(&context, {}, &response).ok());
    return response;
}

v1::StatusResponse HopClient::status() const {
    grpc::ClientContext context;
    context.set_deadline(call_deadline());
    v1::StatusResponse response;
    EXPECT_TRUE(stub_->Status(&context, {}, &response).ok());
    return response;
}

grpc::Status HopClient::open(const v1::OpenRequest & request, v1::OpenResponse & response,
                             v1::RefusalDetail & refusal) const {
    grpc::ClientContext context;
    context.set_deadline(call_deadline());
    const auto status = stub_->Open(&context, request, &response);
    refusal = refusal_in(context);
    return status;
}

grpc::Status HopClient::close(const v1::Ticket & ticket, v1::CloseResponse & response,
                              v1::RefusalDetail & refusal) const {
    grpc::ClientContext context;
    context.set_deadline(call_deadline());
    v1::CloseRequest request;
    *request.mutable_ticket() = ticket;
    const auto status = stub_->Close(&context, request, &response);
    refusal = refusal_in(context);
    return status;
}

grpc::Status HopClient::touch(const v1::Ticket & ticket, v1::TouchResponse & response) const {
    grpc::ClientContext context;
    context.set_deadline(call_deadline());
    v1::TouchRequest request;
    *request.mutable_ticket() = ticket;
    return stub_->Touch(&context, request, &response);
}

Outcome HopClient::generate(const v1::GenerateRequest & request,
                            const std::function<void(const v1::GenerateEvent &)> & each,
                            grpc::ClientContext * context) const {
    grpc::ClientContext own_context;
    context = context == nullptr ? &own_context : context;
    context->set_deadline(call_deadline());
    Outcome outcome;
    auto reader = stub_->Generate(context, request);
    v1::GenerateEvent event;
    while (reader->Read(&event)) {
        EXPECT_FALSE(outcome.finished.has_value() || outcome.failed.has_value()) << "an event after the last one";
        switch (event.event_case()) {
        case v1::GenerateEvent::kToken:
            outcome.tokens.push_back(event.token());
            break;
        case v1::GenerateEvent::kPrefill:
            outcome.prefill.push_back(event.prefill());
            break;
        case v1::GenerateEvent::kFinished:
            outcome.finished = event.finished();
            break;
        case v1::GenerateEvent::kFailed:
            outcome.failed = event.failed();
            break;
        case v1::GenerateEvent::EVENT_NOT_SET:
            ADD_FAILURE() << "an empty event";
        }
        if (each) {
            each(event);
        }
    }
    outcome.status = reader->Finish();
    outcome.refusal = refusal_in(*context);
    return outcome;
}

// --------------------------------------------------------------------------------------------------------- hops

Hop::Hop(const std::string & model, LayerRange layers, WorkerOptions options, uint32_t sequences,
         uint32_t session_tokens)
    : Hop(make_engine(model, layers, session_tokens, sequences), std::move(options),
          [=](LayerRange part, std::unique_ptr<ShardEngine> & engine) {
              engine = make_engine(model, part, session_tokens, sequences);
              return Status::success();
          }) {}

Hop::Hop(std::unique_ptr<ShardEngine> engine, WorkerOptions options, LoadPart load_part) {
    const auto layers = engine->describe().layers;
    LoadPart load_controlled;
    if (load_part != nullptr) {
        load_controlled = [load_part, control = control_](LayerRange part, std::unique_ptr<ShardEngine> & loaded) {
            std::unique_ptr<ShardEngine> inner;
            const Status status = load_part(part, inner);
            if (status.ok()) {
                loaded = std::make_unique<ControlledEngine>(std::move(inner), control);
            }
            return status;
        };
    }
    if (options.shard_id.empty()) {
        options.shard_id = "shard-" + std::to_string(layers.start) + "-" + std::to_string(layers.end);
    }
    options.artifact_digest = artifact;
    worker_ = std::make_unique<Worker>(std::make_unique<ControlledEngine>(std::move(engine), control_),
                                       std::move(options), std::move(load_controlled));
    server_ = std::make_unique<WorkerServer>(*worker_);
    std::string problem;
    EXPECT_TRUE(server_->start("127.0.0.1:0", problem)) << problem;
    client_ = std::make_unique<HopClient>(server_->address());
}

Hop::~Hop() {
    stop();
}

void Hop::stop() {
    control_->release();
    if (server_ != nullptr) {
        server_->stop(0);
        worker_->stop();
    }
}

HopAddress Hop::address() const {
    return {server_->address(), worker_->description()};
}

HopAddress part_of(HopAddress hop, uint32_t start, uint32_t end) {
    auto & d = hop.description;
    const v1::DescribeResponse whole = d;
    const auto boundary = [&](uint32_t layer) {
        const auto & cuts = whole.legal_cuts();
        const auto at = std::find(cuts.begin(), cuts.end(), layer) - cuts.begin();
        return layer == whole.layers().start() ? whole.boundary_in()
               : layer == whole.layers().end() ? whole.boundary_out()
                                               : whole.cut_boundaries(static_cast<int>(at));
    };
    d.mutable_layers()->set_start(start);
    d.mutable_layers()->set_end(end);
    *d.mutable_boundary_in() = boundary(start);
    *d.mutable_boundary_out() = boundary(end);
    return hop;
}

std::string new_session_id() {
    static std::atomic<uint32_t> counter{0};
    std::string id = "session-00000000";
    const std::string number = std::to_string(counter.fetch_add(1));
    return id.replace(id.size() - number.size(), number.size(), number);
}

TestSession::TestSession(std::vector<HopAddress> hops, std::string id) : id_(std::move(id)), hops_(std::move(hops)) {
    for (const auto & hop : hops_) {
        clients_.push_back(std::make_shared<HopClient>(hop.address));
    }
}

v1::Ticket TestSession::ticket() const {
    v1::Ticket ticket;
    ticket.set_session_id(id_);
    ticket.set_epoch(epoch);
    return ticket;
}

v1::OpenRequest TestSession::open_request(size_t hop) const {
    const auto & d = hops_[hop].description;
    v1::OpenRequest request;
    *request.mutable_ticket() = ticket();
    request.set_hop_index(static_cast<uint32_t>(hop));
    request.set_n_hops(static_cast<uint32_t>(hops_.size()));
    *request.mutable_layers() = d.layers();
    request.set_artifact_digest(d.artifact_digest());
    request.set_compatibility_id(d.compatibility_id());
    request.set_boundary_in_digest(d.boundary_in().digest());
    request.set_boundary_out_digest(d.boundary_out().digest());
    request.set_token_capacity(token_capacity);
    if (hop + 1 < hops_.size()) {
        request.mutable_next()->set_address(hops_[hop + 1].address);
        request.mutable_next()->set_shard_id(hops_[hop + 1].description.shard_id());
    }
    request.mutable_head()->set_address(hops_[0].address);
    request.mutable_head()->set_shard_id(hops_[0].description.shard_id());
    return request;
}

v1::GenerateRequest TestSession::generate_request(const std::string & prompt, uint32_t max_new_tokens) const {
    v1::GenerateRequest request;
    *request.mutable_ticket() = ticket();
    for (const char c : prompt) {
        request.add_tokens(static_cast<unsigned char>(c));
    }
    request.set_prefix_hash(prefix_hash_seed);
    request.set_max_new_tokens(max_new_tokens);
    return request;
}

std::vector<v1::OpenResponse> TestSession::open() {
    std::vector<v1::OpenResponse> responses(hops_.size());
    for (size_t hop = hops_.size(); hop-- > 0;) {
        v1::RefusalDetail refusal;
        const auto status = clients_[hop]->open(open_request(hop), responses[hop], refusal);
        EXPECT_TRUE(status.ok()) << "hop " << hop << ": " << status.error_message();
    }
    return responses;
}

Outcome TestSession::generate(const std::string & prompt, uint32_t max_new_tokens) const {
    return clients_[0]->generate(generate_request(prompt, max_new_tokens));
}

std::vector<v1::CloseResponse> TestSession::close() {
    std::vector<v1::CloseResponse> responses(hops_.size());
    for (size_t hop = 0; hop < hops_.size(); ++hop) {
        v1::RefusalDetail refusal;
        EXPECT_TRUE(clients_[hop]->close(ticket(), responses[hop], refusal).ok());
    }
    return responses;
}

std::vector<std::unique_ptr<Hop>> make_hops(const std::string & model, const std::vector<int32_t> & cuts,
                                            WorkerOptions options) {
    std::vector<std::unique_ptr<Hop>> hops;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        hops.push_back(std::make_unique<Hop>(model, LayerRange{cuts[i], cuts[i + 1]}, options));
    }
    return hops;
}

std::vector<HopAddress> addresses(const std::vector<std::unique_ptr<Hop>> & hops) {
    std::vector<HopAddress> result;
    for (const auto & hop : hops) {
        result.push_back(hop->address());
    }
    return result;
}

std::vector<uint32_t> direct_tokens(const std::string & model, const std::string & prompt, uint32_t max_new_tokens,
                                    const v1::SamplingParams & params, bool ignore_eog) {
    auto engine = make_engine(model, {0, 0}, 131072, 1, 131072);
    int32_t sequence = -1;
    EXPECT_TRUE(engine->open_sequence(sequence).ok());
    Sampler sampler(params, engine->describe().n_vocab, 131072);
    Step step;
    step.sequence = sequence;
    for (const char c : prompt) {
        step.tokens.push_back(static_cast<unsigned char>(c));
    }
    std::vector<uint32_t> tokens;
    while (tokens.size() < max_new_tokens) {
        for (const int32_t token : step.tokens) {
            sampler.accept(token);
        }
        step.logits_at = {static_cast<uint32_t>(step.tokens.size()) - 1};
        std::vector<StepResult> results;
        EXPECT_TRUE(engine->execute({step}, results).ok());
        v1::GeneratedToken token;
        const auto position = step.position + static_cast<uint32_t>(step.tokens.size());
        EXPECT_TRUE(sampler.sample(results[0].logits[0], position, token));
        tokens.push_back(token.token());
        if (engine->is_eog(static_cast<int32_t>(token.token())) && !ignore_eog) {
            break;
        }
        step.position += static_cast<uint32_t>(step.tokens.size());
        step.tokens = {static_cast<int32_t>(token.token())};
    }
    return tokens;
}

// --------------------------------------------------------------------------------------------------------- seam

SeamPeer::SeamPeer(const std::string & address)
    : channel_(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
      method_(std::make_unique<grpc::internal::RpcMethod>("/meshnet.v1.Seam/Carry",
                                                          grpc::internal::RpcMethod::BIDI_STREAMING, channel_)) {
    context_.set_deadline(call_deadline());
    stream_.reset(grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
        channel_.get(), *method_, &context_));
}

SeamPeer::~SeamPeer() {
    if (stream_ != nullptr) {
        context_.TryCancel();
        static_cast<void>(stream_->Finish());
    }
}

uint64_t SeamPeer::send(v1::SeamFrame frame) {
    frame.set_frame_no(++frame_no_);
    send_raw(frame.SerializeAsString());
    return frame_no_;
}

void SeamPeer::send_raw(const std::string & bytes) {
    grpc::Slice slice(bytes);
    grpc::ByteBuffer buffer(&slice, 1);
    stream_->Write(buffer);  // fails once the worker has ended the stream
}

std::optional<v1::SeamCredit> SeamPeer::credit() {
    while (credits_.empty()) {
        grpc::ByteBuffer buffer;
        v1::SeamCredits read;
        if (!stream_->Read(&buffer)) {
            return std::nullopt;
        }
        EXPECT_TRUE(grpc::SerializationTraits<v1::SeamCredits>::Deserialize(&buffer, &read).ok());
        credits_.insert(credits_.end(), read.credits().begin(), read.credits().end());
        ++messages_;
    }
    auto credit = std::move(credits_.front());
    credits_.pop_front();
    return credit;
}

grpc::Status SeamPeer::finish() {
    stream_->WritesDone();
    while (credit().has_value()) {
    }
    const auto status = stream_->Finish();
    stream_.reset();
    return status;
}

FakeNeighbour::FakeNeighbour() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
}

FakeNeighbour::~FakeNeighbour() {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
}

std::optional<v1::SeamFrame> FakeNeighbour::next_frame() {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, std::chrono::milliseconds(deadline_ms), [&] { return !frames_.empty(); })) {
        return std::nullopt;
    }
    auto frame = std::move(frames_.front());
    frames_.erase(frames_.begin());
    return frame;
}

void FakeNeighbour::give_credit(int times) {
    std::lock_guard lock(mutex_);
    credits_per_frame_ = times;
}

grpc::Status FakeNeighbour::Carry(grpc::ServerContext *,
                                  grpc::ServerReaderWriter<v1::SeamCredits, v1::SeamFrame> * stream) {
    stream->SendInitialMetadata();
    v1::SeamFrame frame;
    while (stream->Read(&frame)) {
        const uint64_t number = frame.frame_no();
        v1::SeamCredits credits;
        {
            std::lock_guard lock(mutex_);
            frames_.push_back(std::move(frame));
            for (int i = 0; i < credits_per_frame_; ++i) {
                credits.add_credits()->set_frame_no(number);
            }
            arrived_.notify_all();
        }
        if (credits.credits_size() > 0) {
            stream->Write(credits);
        }
    }
    return grpc::Status::OK;
}

v1::SeamFrame step_frame(const std::string & session_id, uint64_t epoch, uint32_t position,
                         const std::vector<uint32_t> & prefix, const std::vector<uint32_t> & tokens) {
    uint64_t hash = prefix_hash_seed;
    for (const uint32_t token : prefix) {
        hash = extend_prefix_hash(hash, static_cast<int32_t>(token));
    }
    v1::SeamFrame frame;
    frame.set_session_id(session_id);
    frame.set_epoch(epoch);
    auto * step = frame.mutable_step();
    step->set_position(position);
    step->mutable_tokens()->Add(tokens.begin(), tokens.end());
    step->set_prefix_hash(hash);
    step->mutable_sampling();
    auto * tensor = step->add_boundary();
    tensor->set_name("state");
    tensor->set_dtype(v1::DTYPE_F32);
    tensor->add_shape(16);
    tensor->set_data(std::string(tokens.size() * 64, '\0'));
    return frame;
}

}  // namespace meshnet::test
