// Worker: the engine thread.
#include <exception>
#include <map>

#include "worker/clock.h"
#include "worker/convert.h"
#include "worker/log.h"
#include "worker/worker.h"

namespace meshnet {

void Worker::run_engine() {
    whole_->engine->bind_thread();
    std::unique_lock lock(mutex_);
    while (true) {
        close_sequences(lock);
        Effects effects;
        auto jobs = take_jobs(effects);
        if (!jobs.empty()) {
            lock.unlock();
            effects.perform();
            compute(jobs);
            Effects results;
            lock.lock();
            for (auto & job : jobs) {
                commit(job, results);
            }
            lock.unlock();
            results.perform();
            jobs.clear();
            lock.lock();
        } else if (stopping_) {
            return;
        } else {
            lock.unlock();
            effects.perform();  // of sessions that failed while their step was taken
            lock.lock();
            engine_wake_.wait(lock, [&] { return stopping_ || has_work(); });
        }
    }
}

bool Worker::has_work() const {
    if (!sequences_to_close_.empty()) {
        return true;
    }
    for (const auto & [id, session] : sessions_) {
        if (is_ready(*session)) {
            return true;
        }
    }
    return false;
}

bool Worker::is_ready(const Session & session) const {
    if (session.computing || session.failure.has_value() || !session.window_open()) {
        return false;
    }
    if (session.is_head()) {
        return session.generation != nullptr && session.generation->has_step() && session.generation->sink().has_room();
    }
    return !session.inbox.empty();
}

// Under the mutex; not while the session's step is computed.
void Worker::give_up_sequence(const ServedPtr & served, Session & session) {
    if (const int32_t sequence = std::exchange(session.sequence, -1); sequence >= 0) {
        sequences_to_close_.emplace_back(served, sequence);
        engine_wake_.notify_one();
    }
}

void Worker::close_sequences(std::unique_lock<std::mutex> & lock) {
    while (!sequences_to_close_.empty()) {
        const auto sequences = std::exchange(sequences_to_close_, {});
        lock.unlock();
        for (const auto & [served, sequence] : sequences) {
            if (const auto status = served->engine->close_sequence(sequence); !status.ok()) {
                log_error("cannot close sequence " + std::to_string(sequence) + ": " + status.message);
            }
        }
        lock.lock();
    }
}

std::vector<Worker::Job> Worker::take_jobs(Effects & effects) {
    std::vector<Job> jobs;
    while (jobs.empty()) {
        std::vector<SessionPtr> sessions;
        std::vector<ReadyStep> ready;
        for (const auto & [id, session] : sessions_) {
            if (is_ready(*session)) {
                const bool prefill = session->is_head() ? session->generation->next_is_prefill()
                                                        : session->inbox.front().frame.prefill();
                sessions.push_back(session);
                ready.push_back({prefill, session->last_served});
            }
        }
        const auto chosen = scheduler_.choose(ready);
        if (chosen.empty()) {
            break;
        }
        for (const size_t index : chosen) {
            Job job;
            if (take_job(sessions[index], job, effects)) {
                jobs.push_back(std::move(job));
            }
        }
    }
    return jobs;
}

// False if the step was refused, which ends the session's epoch.
bool Worker::take_job(const SessionPtr & session, Job & job, Effects & effects) {
    auto & s = *session;
    const int64_t now = now_us();
    s.last_served = scheduler_.served();
    s.last_activity_us = now;
    int64_t ready_since_us = 0;
    if (s.is_head()) {
        ready_since_us = s.ready_since_us;
        job.frame = s.generation->next_step();
        job.generation_no = s.generation_no;
    } else {
        job.frame = std::move(s.inbox.front().frame);
        job.credit = std::move(s.inbox.front().credit);
        s.inbox.pop_front();
        ready_since_us = job.credit.arrived_us();
    }
    s.stats->set_queue_us(s.stats->queue_us() + static_cast<uint64_t>(now - ready_since_us));

    if (auto refusal = check_job(s, job.frame); refusal.refused()) {
        totals_.set_refused_frames(totals_.refused_frames() + (s.is_head() ? 0 : 1));
        refuse(s, refusal, effects);
        effects.credits.push_back(std::move(job.credit));
        return false;
    }
    const uint32_t position = job.frame.position();
    job.cached_before = s.history.length();
    job.frame.set_prefix_hash(s.history.hash_at(position));
    if (job.frame.step_timeout_ms() > 0) {
        s.step_timeout_us = int64_t{job.frame.step_timeout_ms()} * 1000;
    }
    if (!s.is_tail() && job.frame.has_sampling()) {
        auto & opening = s.opening.emplace();
        opening.set_position(job.frame.resume_at().empty() ? position
                                                           : job.frame.resume_at(static_cast<int>(s.hop_index) + 1));
        *opening.mutable_sampling() = job.frame.sampling();
        opening.set_step_timeout_ms(job.frame.step_timeout_ms());
        *opening.mutable_resume_at() = job.frame.resume_at();
    }
    s.history.truncate(position);
    s.computing = true;
    job.session = session;
    job.served = s.served;
    job.epoch = s.epoch;
    job.token_capacity = s.token_capacity;
    job.stats = s.stats;
    return true;
}

// What a step must be that is the session's next.
Refusal Worker::check_job(const Session & session, const v1::StepFrame & frame) const {
    const uint32_t position = frame.position();
    const uint32_t cached = session.history.length();
    const auto n = static_cast<uint32_t>(frame.tokens_size());
    if (frame.rollback() ? position > cached : position != cached) {
        return {v1::REFUSAL_PREFIX_MISMATCH,
                "position " + std::to_string(position) + " does not follow the " + std::to_string(cached) +
                    " tokens cached here",
                position, cached};
    }
    if (!session.is_head() && frame.prefix_hash() != session.history.hash_at(position)) {
        return {v1::REFUSAL_PREFIX_MISMATCH,
                "the first " + std::to_string(position) + " tokens are not the ones cached here", position, cached};
    }
    if (n > session.token_capacity || position > session.token_capacity - n) {
        return {v1::REFUSAL_TOO_LONG, "the session holds " + std::to_string(session.token_capacity) + " tokens",
                uint64_t{position} + n, session.token_capacity};
    }
    if (auto refusal = FrameRules::check_resume(frame, session.hop_index, session.n_hops); refusal.refused()) {
        return refusal;
    }
    uint32_t next_at = position;  // where the next hop begins, if it has not begun yet
    if (!frame.resume_at().empty() && !session.is_tail()) {
        next_at = frame.resume_at(static_cast<int>(session.hop_index) + 1);
    } else if (!frame.has_sampling() && session.opening.has_value()) {
        next_at = session.opening->position();
    }
    if (position < next_at && (position + n > next_at || frame.sample_at_size() > 0)) {
        return bad_request("the step from " + std::to_string(position) + " to " + std::to_string(position + n) +
                           " crosses position " + std::to_string(next_at) + ", where the next hop resumes");
    }
    return Refusal::none();
}

void Worker::compute(std::vector<Job> & jobs) {
    // Steps on the same layers together.
    std::map<ServedPtr, std::vector<Job *>> groups;
    for (auto & job : jobs) {
        groups[job.served].push_back(&job);
    }
    for (const auto & [served, group] : groups) {
        try {
            execute(*served, group);
        } catch (const std::exception & error) {
            for (auto * job : group) {
                job->refusal = {v1::REFUSAL_ENGINE_FAILURE, std::string("the engine failed: ") + error.what(), 0, 0};
                job->cache_lost = true;
            }
        }
    }
}

void Worker::execute(const Served & served, const std::vector<Job *> & jobs) {
    std::vector<Step> steps;
    std::vector<Job *> prepared;
    uint64_t n_tokens = 0;
    for (auto * job : jobs) {
        if (auto status = prepare(*job); !status.ok()) {
            job->refusal = refusal_of(status);
        } else {
            steps.push_back(std::move(job->step));
            prepared.push_back(job);
            n_tokens += static_cast<uint64_t>(job->frame.tokens_size());
        }
    }
    if (prepared.empty()) {
        return;
    }
    std::vector<StepResult> results;
    const int64_t start_us = now_us();
    const auto status = served.engine->execute(steps, results);
    const auto elapsed_us = static_cast<uint64_t>(now_us() - start_us);
    for (size_t i = 0; i < prepared.size(); ++i) {
        auto & job = *prepared[i];
        job.compute_us = elapsed_us * static_cast<uint64_t>(job.frame.tokens_size()) / n_tokens;
        job.advanced = status.ok();
        if (!status.ok()) {
            job.refusal = refusal_of(status);
            // What a backend that failed holds, or one that counts otherwise, is nothing to go on from.
            job.cache_lost = status.code == Code::engine_failure || status.code == Code::failed_precondition;
        } else if (served.model.is_tail()) {
            job.result = std::move(results[i]);
            sample(job);
        } else {
            put_boundary(served.model.boundary_out, results[i].boundary, job.frame);
        }
    }
}

// Makes the engine's sequence ready for the job's step.
Status Worker::prepare(Job & job) {
    auto & sequence = job.session->sequence;
    auto & engine = *job.served->engine;
    const uint32_t position = job.frame.position();
    if (sequence >= 0 && job.cached_before > position) {
        auto status = engine.rollback(sequence, position);
        if (!status.ok()) {
            // Position 0 needs no rollback: an empty sequence does.
            job.cache_lost = position > 0;
            const int32_t old = std::exchange(sequence, -1);
            if (auto closed = engine.close_sequence(old); !closed.ok()) {
                return closed;
            }
            if (position > 0) {
                return status;
            }
        }
    }
    if (sequence < 0) {
        if (auto status = engine.open_sequence(sequence); !status.ok()) {
            sequence = -1;
            return status;
        }
    }
    job.step.sequence = sequence;
    job.step.position = position;
    job.step.tokens.assign(job.frame.tokens().begin(), job.frame.tokens().end());
    job.step.boundary = take_boundary(job.frame);
    if (job.served->model.is_tail()) {
        job.step.logits_at.assign(job.frame.sample_at().begin(), job.frame.sample_at().end());
    }
    return Status::success();
}

// Tail: passes the step's tokens through the sampler and samples where asked.
void Worker::sample(Job & job) {
    const int64_t start_us = now_us();
    auto & sampler = job.session->sampler;
    const auto & before = job.session->history.tokens();
    if (job.frame.has_sampling()) {
        sampler = std::make_unique<Sampler>(job.frame.sampling(), model_.n_vocab, job.token_capacity);
        sampler->reset_window(before);
        job.session->sampler_epoch = job.epoch;
    } else if (sampler != nullptr && job.cached_before > job.frame.position()) {
        sampler->reset_window(before);
    }
    if (sampler == nullptr || job.session->sampler_epoch != job.epoch) {
        job.refusal = bad_request("the first step of a generation must carry sampling parameters");
        return;
    }
    int next = 0;
    for (int i = 0; i < job.frame.tokens_size(); ++i) {
        sampler->accept(static_cast<int32_t>(job.frame.tokens(i)));
        if (next >= job.frame.sample_at_size() || job.frame.sample_at(next) != static_cast<uint32_t>(i)) {
            continue;
        }
        auto & token = *job.sampled.add_tokens();
        const uint32_t position = job.frame.position() + static_cast<uint32_t>(i) + 1;
        if (!sampler->sample(job.result.logits[static_cast<size_t>(next)], position, token)) {
            job.refusal = {v1::REFUSAL_ENGINE_FAILURE, "the model's logits are not finite", 0, 0};
            return;
        }
        token.set_is_eog(vocabulary_.is_eog(static_cast<int32_t>(token.token())));
        Status status = vocabulary_.piece(static_cast<int32_t>(token.token()), *token.mutable_piece());
        for (auto & top : *token.mutable_top()) {
            if (status.ok()) {
                status = vocabulary_.piece(static_cast<int32_t>(top.token()), *top.mutable_piece());
            }
        }
        if (!status.ok()) {
            job.refusal = refusal_of(status);
            return;
        }
        ++next;
    }
    job.sample_us = static_cast<uint64_t>(now_us() - start_us);
}

void Worker::commit(Job & job, Effects & effects) {
    auto & s = *job.session;
    const auto n = static_cast<uint32_t>(job.frame.tokens_size());
    s.computing = false;
    s.last_activity_us = now_us();
    s.ready_since_us = s.last_activity_us;
    if (job.cache_lost || job.served != s.served) {
        s.history.truncate(0);
        give_up_sequence(job.served, s);
    } else if (job.advanced) {
        s.history.append({job.frame.tokens().begin(), job.frame.tokens().end()});
    }
    if (job.advanced && !job.cache_lost) {
        auto & stats = *job.stats;
        stats.set_compute_us(stats.compute_us() + job.compute_us);
        stats.set_sample_us(stats.sample_us() + job.sample_us);
        if (job.frame.prefill()) {
            stats.set_prefill_tokens(stats.prefill_tokens() + n);
            totals_.set_prefill_tokens(totals_.prefill_tokens() + n);
            totals_.set_prefill_compute_us(totals_.prefill_compute_us() + job.compute_us);
        } else {
            stats.set_decode_tokens(stats.decode_tokens() + n);
            totals_.set_decode_tokens(totals_.decode_tokens() + n);
            totals_.set_decode_compute_us(totals_.decode_compute_us() + job.compute_us);
        }
    }
    if (s.cannot_report() && job.epoch == s.epoch) {
        job.credit.refuse(v1::REFUSAL_PEER_LOST);
    } else if (job.epoch == s.epoch && !job.frame.prefill() && !job.refusal.refused() && !s.closed &&
               !s.failure.has_value()) {
        let_wait(job.credit);
    }
    effects.credits.push_back(std::move(job.credit));
    effects.garbage.push_back(job.session);
    for (auto & reply : std::exchange(s.when_idle, {})) {
        effects.replies.push_back(std::move(reply));
    }
    if (s.closed) {
        give_up_sequence(job.served, s);
        return;
    }
    if (job.epoch != s.epoch || s.failure.has_value() || (s.is_head() && job.generation_no != s.generation_no)) {
        return;  // nobody waits for this step any more
    }
    if (job.refusal.refused()) {
        refuse(s, job.refusal, effects);
        return;
    }
    const bool samples = job.frame.sample_at_size() > 0;
    if (s.is_head() && samples) {
        ++s.samples_outstanding;
    }
    if (!s.is_tail()) {
        forward(job, effects);
        return;
    }
    if (s.is_head() && job.frame.prefill()) {
        s.generation->on_prefill_done(n);
        effects.flushes.push_back(s.generation->shared_sink());
    }
    if (!samples) {
        return;
    }
    if (s.is_head()) {
        sampled(s, job.sampled, effects);
    } else {
        v1::SeamFrame frame;
        frame.mutable_sampled()->Swap(&job.sampled);
        send(s, std::move(frame), {}, effects);
    }
}

// Not the tail: sends a computed step on, unless the next hop holds its tokens already.
void Worker::forward(Job & job, Effects & effects) {
    auto & s = *job.session;
    const auto n = static_cast<uint32_t>(job.frame.tokens_size());
    if (s.opening.has_value() && job.frame.position() < s.opening->position()) {
        if (s.is_head()) {
            s.generation->on_prefill_done(n);
            effects.flushes.push_back(s.generation->shared_sink());
        }
        return;
    }
    v1::SeamFrame frame;
    auto & step = *frame.mutable_step();
    step.Swap(&job.frame);
    if (s.opening.has_value()) {
        step.set_rollback(true);
        step.mutable_sampling()->Swap(s.opening->mutable_sampling());
        step.set_step_timeout_ms(s.opening->step_timeout_ms());
        step.mutable_resume_at()->Swap(s.opening->mutable_resume_at());
        s.opening.reset();
    }
    SentFrame sent;
    sent.prefill_tokens = step.prefill() ? n : 0;
    sent.generation_no = job.generation_no;
    send(s, std::move(frame), std::move(sent), effects);
}

}  // namespace meshnet
