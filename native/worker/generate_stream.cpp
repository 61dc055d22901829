#include "worker/generate_stream.h"

#include "worker/message.h"

namespace meshnet {
namespace {

// Tokens a gateway may be behind before its session pauses.
constexpr size_t max_queued_events = 64;

}  // namespace

GenerateStream * GenerateStream::start(Worker & worker, grpc::CallbackServerContext & context,
                                       grpc::ByteBuffer & bytes) {
    v1::GenerateRequest request;
    Refusal refusal = read_message(bytes, request);
    auto stream = std::make_shared<GenerateStream>(worker, request.ticket().session_id());
    {
        std::lock_guard lock(stream->mutex_);
        stream->self_ = stream;
    }
    try {
        if (!refusal.refused()) {
            refusal = worker.generate(request, stream);
        }
    } catch (const std::exception & error) {
        worker.cancel(stream->session_id_, stream.get());
        refusal = {v1::REFUSAL_ENGINE_FAILURE, std::string("cannot start the generation: ") + error.what(), 0, 0};
    }
    if (refusal.refused()) {
        const auto status = to_status(refusal, context);
        std::lock_guard lock(stream->mutex_);
        stream->finish(status);
    }
    return stream.get();
}

GenerateStream::GenerateStream(Worker & worker, std::string session_id)
    : worker_(worker), session_id_(std::move(session_id)) {}

void GenerateStream::push(v1::GenerateEvent event, bool last) {
    std::lock_guard lock(mutex_);
    if (ended_ || cancelled_) {
        return;
    }
    ended_ = last;
    queue_.push_back(std::move(event));
    queued_events_ = queue_.size();
}

void GenerateStream::flush() {
    std::lock_guard lock(mutex_);
    write_next();
}

bool GenerateStream::has_room() const {
    return queued_events_ < max_queued_events;
}

void GenerateStream::OnWriteDone(bool) {
    bool was_full = false;
    {
        std::lock_guard lock(mutex_);
        writing_ = false;
        was_full = queue_.size() >= max_queued_events;
        if (cancelled_) {
            finish(grpc::Status::CANCELLED);
        } else {
            write_next();
        }
    }
    if (was_full) {
        worker_.wake();
    }
}

void GenerateStream::OnCancel() {
    {
        std::lock_guard lock(mutex_);
        cancelled_ = true;
        queue_.clear();
        queued_events_ = 0;
        if (!writing_) {
            finish(grpc::Status::CANCELLED);
        }
    }
    worker_.cancel(session_id_, this);
}

void GenerateStream::OnDone() {
    std::shared_ptr<GenerateStream> last;  // destroyed after the lock is released
    std::lock_guard lock(mutex_);
    last = std::move(self_);
}

void GenerateStream::write_next() {
    if (writing_ || finished_ || queue_.empty()) {
        return;
    }
    current_ = to_bytes(queue_.front());
    queue_.pop_front();
    queued_events_ = queue_.size();
    writing_ = true;
    if (ended_ && queue_.empty()) {
        finished_ = true;
        StartWriteAndFinish(&current_, {}, grpc::Status::OK);
    } else {
        StartWrite(&current_);
    }
}

void GenerateStream::finish(const grpc::Status & status) {
    if (!finished_) {
        finished_ = true;
        Finish(status);
    }
}

}  // namespace meshnet
