// How long a token's way round the ring takes when computing takes no time: `meshnet-ring-bench [hops] [tokens]`.
// Real processes on loopback with the test engine; prints the median and the spread of seven runs.
#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "tests/worker_support.h"

extern char ** environ;

namespace {

using meshnet::test::HopAddress;
using meshnet::test::TestSession;

pid_t spawn(const std::string & layers, HopAddress & hop) {
    std::vector<std::string> arguments = {MESHNET_SHARD_BINARY, "--engine", "test",      "--model", "test:12:0",
                                          "--layers",           layers,     "--context", "20000"};
    std::vector<char *> argv;
    for (auto & argument : arguments) {
        argv.push_back(argument.data());
    }
    argv.push_back(nullptr);
    int out[2];
    if (pipe2(out, O_CLOEXEC) != 0) {
        std::abort();
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    pid_t pid = -1;
    if (posix_spawn(&pid, MESHNET_SHARD_BINARY, &actions, nullptr, argv.data(), environ) != 0) {
        std::abort();
    }
    close(out[1]);
    std::string line;
    for (char c = 0; read(out[0], &c, 1) == 1 && c != '\n';) {
        line.push_back(c);
    }
    const std::string address = "\"address\":\"";
    const std::string description = "\"description\":";
    const size_t at = line.find(address) + address.size();
    hop.address = line.substr(at, line.find('"', at) - at);
    const size_t json = line.find(description) + description.size();
    if (!google::protobuf::util::JsonStringToMessage(line.substr(json, line.size() - json - 1), &hop.description)
             .ok()) {
        std::fprintf(stderr, "no worker: %s\n", line.c_str());
        std::abort();
    }
    return pid;
}

}  // namespace

int main(int argc, char ** argv) {
    const int n_hops = argc > 1 ? std::atoi(argv[1]) : 2;
    const int n_tokens = argc > 2 ? std::atoi(argv[2]) : 2000;
    if (n_hops < 1 || n_hops > 12 || n_tokens < 2 || n_tokens > 19000) {
        std::fprintf(stderr, "usage: meshnet-ring-bench [hops 1..12] [tokens 2..19000]\n");
        return 2;
    }
    std::vector<HopAddress> hops(static_cast<size_t>(n_hops));
    std::vector<pid_t> workers;
    for (int i = 0; i < n_hops; ++i) {
        const int start = 12 * i / n_hops;
        const int end = 12 * (i + 1) / n_hops;
        workers.push_back(spawn(std::to_string(start) + ":" + std::to_string(end), hops[static_cast<size_t>(i)]));
    }
    std::vector<double> trips_us;
    std::vector<meshnet::v1::CloseResponse> closed;
    for (int run = 0; run < 7; ++run) {
        TestSession session(hops);
        session.token_capacity = 20000;
        session.open();
        auto request = session.generate_request("x", static_cast<uint32_t>(n_tokens));
        request.set_ignore_eog(true);
        const auto outcome = session.client(0).generate(request);
        if (!outcome.finished.has_value()) {
            std::fprintf(stderr, "the generation failed\n");
            return 1;
        }
        trips_us.push_back(static_cast<double>(outcome.finished->decode_us()) / (n_tokens - 1));
        closed = session.close();
    }
    std::sort(trips_us.begin(), trips_us.end());
    std::printf("%d hops: %.0f us per token (%.0f to %.0f)\n", n_hops, trips_us[3], trips_us[0], trips_us[6]);
    for (const auto & hop : closed) {
        const auto & s = hop.stats();
        std::printf("  hop %u: queue %.1f, compute %.1f, sample %.1f, network %.1f us per token\n", s.hop_index(),
                    static_cast<double>(s.queue_us()) / n_tokens, static_cast<double>(s.compute_us()) / n_tokens,
                    static_cast<double>(s.sample_us()) / n_tokens, static_cast<double>(s.network_us()) / n_tokens);
    }
    for (const pid_t pid : workers) {
        if (pid > 0) {  // kill(-1) would mean every process
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
        }
    }
    return 0;
}
