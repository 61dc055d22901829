// meshnet-shard: one process, one range of layers of one model. See README and proto/meshnet/v1/shard.proto.
#include <absl/synchronization/mutex.h>
#include <google/protobuf/util/json_util.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "worker/flags.h"
#include "worker/log.h"
#include "worker/memory.h"
#include "worker/service.h"
#include "worker/worker.h"

namespace meshnet {
namespace {

constexpr int exit_usage = 2;
constexpr int exit_load = 3;
constexpr int64_t wait_slice_ms = 50;
// After the drain: for answers that are still being written. A client that does not read takes all of it.
constexpr int64_t last_answers_ms = 100;

std::string json_of(const google::protobuf::Message & message) {
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    std::string json;
    if (!google::protobuf::util::MessageToJsonString(message, &json, options).ok()) {
        return "{}";
    }
    return json;
}

// A JSON string literal, by way of protobuf's own printer.
std::string json_string(const std::string & text) {
    v1::Peer holder;
    holder.set_address(printable(text));
    const std::string json = json_of(holder);
    const std::string key = "\"address\":";
    return json.substr(json.find(key) + key.size(), json.size() - json.find(key) - key.size() - 1);
}

void print_line(const std::string & line) {
    std::fputs((line + "\n").c_str(), stdout);
    std::fflush(stdout);
}

int report_failure(const std::string & code, const std::string & message) {
    log_error(message);
    print_line("{\"event\":\"failed\",\"code\":" + json_string(code) + ",\"message\":" + json_string(message) + "}");
    return exit_load;
}

int report_needs(const EngineConfig & config) {
    RangeNeeds needs;
    if (const Status status = llama_range_needs(config, needs); !status.ok()) {
        return report_failure(code_name(status.code), status.message);
    }
    std::string names;
    for (const std::string & name : needs.shared_tensors) {
        names += (names.empty() ? "" : ",") + json_string(name);
    }
    print_line("{\"event\":\"needs\",\"n_layer\":" + std::to_string(needs.n_layer) +
               ",\"start\":" + std::to_string(needs.layers.start) + ",\"end\":" + std::to_string(needs.layers.end) +
               ",\"shared_tensors\":[" + names + "]}");
    return 0;
}

// SIGTERM, SIGINT and a closed standard input, as something to wait for.
class StopRequests {
  public:
    // Blocks the signals in the calling thread and all it starts later.
    explicit StopRequests(bool watch_stdin) : watch_stdin_(watch_stdin) {
        sigset_t signals;
        sigemptyset(&signals);
        sigaddset(&signals, SIGTERM);
        sigaddset(&signals, SIGINT);
        pthread_sigmask(SIG_BLOCK, &signals, nullptr);
        signal_fd_ = signalfd(-1, &signals, SFD_CLOEXEC);
        std::signal(SIGPIPE, SIG_IGN);
    }
    ~StopRequests() {
        ::close(signal_fd_);
    }
    StopRequests(const StopRequests &) = delete;
    StopRequests & operator=(const StopRequests &) = delete;

    enum class Event { none, signal, parent_gone };

    // Waits for at most `timeout_ms`; -1 is forever.
    Event wait(int timeout_ms) {
        pollfd fds[2] = {{signal_fd_, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
        if (poll(fds, watch_stdin_ ? 2 : 1, timeout_ms) <= 0) {
            return Event::none;
        }
        if ((fds[0].revents & POLLIN) != 0) {
            signalfd_siginfo info{};
            return read(signal_fd_, &info, sizeof(info)) == sizeof(info) ? Event::signal : Event::none;
        }
        if (watch_stdin_ && fds[1].revents != 0) {
            char discarded[256];
            return read(STDIN_FILENO, discarded, sizeof(discarded)) <= 0 ? Event::parent_gone : Event::none;
        }
        return Event::none;
    }

  private:
    bool watch_stdin_;
    int signal_fd_ = -1;
};

// Lets open sessions end. True if they did; false at the timeout, a second signal, or when the parent goes.
bool drain(Worker & worker, StopRequests & requests, int64_t timeout_s) {
    worker.drain();
    for (int64_t waited_ms = 0; waited_ms < timeout_s * 1000; waited_ms += wait_slice_ms) {
        if (worker.wait_drained(0)) {
            return true;
        }
        if (requests.wait(wait_slice_ms) != StopRequests::Event::none) {
            return false;
        }
    }
    return worker.wait_drained(0);
}

int run(Flags flags) {
    // Debian's abseil looks for deadlocks in every lock that gRPC takes.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    StopRequests requests(flags.exit_with_parent);
    if (const char * hex = std::getenv("MESHNET_WORKER_KEY"); hex != nullptr && *hex != '\0') {
        if (!TicketVerifier::parse_key(hex, flags.worker.ticket_key)) {
            std::fputs("meshnet-shard: MESHNET_WORKER_KEY must be hex digits\n", stderr);
            return exit_usage;
        }
    }
    if (flags.needs) {
        return report_needs(flags.engine);
    }
    // A copy can lie in huge pages, and nobody can cut it short while it is used. To describe it needs none.
    // What is mapped instead, because memory is short, the system reads again and again; but it runs.
    flags.engine.most_copied_bytes = flags.describe ? 0 : free_memory_bytes() / 4 * 3;
    const auto make_engine = flags.engine_kind == "test" ? make_test_engine : make_llama_engine;
    std::unique_ptr<ShardEngine> engine;
    const auto loaded = make_engine(flags.engine, engine);
    if (!loaded.ok()) {
        return report_failure(code_name(loaded.code), loaded.message);
    }
    if (flags.worker.shard_id.empty()) {
        const auto & layers = engine->describe().layers;
        flags.worker.shard_id =
            flags.engine_kind + "-" + std::to_string(layers.start) + "-" + std::to_string(layers.end);
    }
    EngineConfig part = flags.engine;
    part.find_cuts = false;
    part.most_copied_bytes = 0;  // a session waits for it, and it may soon go again
    const auto load_part = [make_engine, part](LayerRange layers, std::unique_ptr<ShardEngine> & loaded_part) mutable {
        part.layers = layers;
        return make_engine(part, loaded_part);
    };
    Worker worker(std::move(engine), flags.worker, load_part);
    if (flags.describe) {
        print_line(json_of(worker.description()));
        return 0;
    }
    WorkerServer server(worker);
    std::string problem;
    if (!server.start(flags.listen, problem)) {
        return report_failure("listen", problem);
    }
    log_info("serving layers " + std::to_string(worker.description().layers().start()) + ":" +
             std::to_string(worker.description().layers().end()) + " of " + worker.description().model_name() + " on " +
             server.address());
    print_line("{\"event\":\"ready\",\"address\":" + json_string(server.address()) +
               ",\"description\":" + json_of(worker.description()) + "}");

    StopRequests::Event event = StopRequests::Event::none;
    while (event == StopRequests::Event::none) {
        event = requests.wait(-1);
    }
    if (event == StopRequests::Event::signal) {
        log_info("draining: no new sessions");
        if (!drain(worker, requests, flags.drain_timeout_s)) {
            log_warning("sessions were still open; exiting all the same");
            std::fflush(nullptr);
            _exit(0);
        }
    } else {
        log_info("the parent process is gone; exiting");
        std::fflush(nullptr);
        _exit(0);
    }
    server.stop(last_answers_ms);
    worker.stop();
    log_info("drained");
    return 0;
}

}  // namespace
}  // namespace meshnet

int main(int argc, char ** argv) {
    meshnet::Flags flags;
    std::string problem;
    if (!meshnet::parse_flags(argc, argv, flags, problem)) {
        std::fprintf(stderr, "meshnet-shard: %s\n", problem.c_str());
        return meshnet::exit_usage;
    }
    if (flags.help) {
        std::fputs(meshnet::flags_help().c_str(), stdout);
        return 0;
    }
    try {
        return meshnet::run(std::move(flags));
    } catch (const std::exception & error) {
        return meshnet::report_failure("engine_failure", error.what());
    }
}
