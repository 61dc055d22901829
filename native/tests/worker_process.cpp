// meshnet-shard as real processes: start-up lines, signals, lost and hung neighbours.
#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "tests/worker_support.h"

extern char ** environ;

namespace meshnet::test {
namespace {

const std::string prompt = "across processes";

// A child process with pipes to its standard input and from its output and errors.
class Process {
  public:
    explicit Process(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), MESHNET_SHARD_BINARY);
        std::vector<char *> argv;
        for (auto & argument : arguments) {
            argv.push_back(argument.data());
        }
        argv.push_back(nullptr);
        int in[2];
        int out[2];
        EXPECT_EQ(pipe2(in, O_CLOEXEC), 0);
        EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
        posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
        const int error = posix_spawn(&pid_, MESHNET_SHARD_BINARY, &actions, nullptr, argv.data(), environ);
        posix_spawn_file_actions_destroy(&actions);
        close(in[0]);
        close(out[1]);
        stdin_ = in[1];
        stdout_ = out[0];
        if (error != 0) {
            pid_ = 0;
            throw std::runtime_error(std::string("cannot start ") + MESHNET_SHARD_BINARY + ": " + strerror(error));
        }
    }

    ~Process() {
        if (!waited_) {
            signal(SIGKILL);
            wait();
        }
        close_stdin();
        close(stdout_);
    }

    Process(const Process &) = delete;
    Process & operator=(const Process &) = delete;

    // Never to anything but this one child: 0 and negative numbers mean many processes to kill().
    void signal(int number) const {
        if (pid_ > 0 && !waited_) {
            kill(pid_, number);
        }
    }

    void close_stdin() {
        if (stdin_ >= 0) {
            close(std::exchange(stdin_, -1));
        }
    }

    // The exit code, or minus the signal that ended it; -1000 at the deadline.
    int wait() {
        int status = 0;
        if (!eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; })) {
            return -1000;
        }
        waited_ = true;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

    // The next line of its output; empty at the end or the deadline.
    std::string read_line() {
        std::string line;
        char c = 0;
        pollfd waiting{stdout_, POLLIN, 0};
        while (poll(&waiting, 1, static_cast<int>(deadline_ms)) > 0 && read(stdout_, &c, 1) == 1 && c != '\n') {
            line.push_back(c);
        }
        return line;
    }

  private:
    pid_t pid_ = 0;
    int stdin_ = -1;
    int stdout_ = -1;
    bool waited_ = false;
};

std::string field(const std::string & json, const std::string & key) {
    const std::string start = "\"" + key + "\":\"";
    const size_t at = json.find(start);
    return at == std::string::npos
               ? ""
               : json.substr(at + start.size(), json.find('"', at + start.size()) - at - start.size());
}

// A worker process that is ready to serve.
class ShardProcess {
  public:
    ShardProcess(const std::string & layers, const std::vector<std::string> & more = {},
                 const std::string & model = "test:6")
        : process_(flags(layers, more, model)) {
        const std::string line = process_.read_line();
        EXPECT_EQ(field(line, "event"), "ready") << line;
        address_.address = field(line, "address");
        const size_t description = line.find("\"description\":");
        if (description == std::string::npos) {
            ADD_FAILURE() << "no description in " << line;
            return;
        }
        const std::string json = line.substr(description + 14, line.size() - description - 15);
        EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(json, &address_.description).ok()) << json;
    }

    Process & process() {
        return process_;
    }
    const HopAddress & address() const {
        return address_;
    }

  private:
    static std::vector<std::string> flags(const std::string & layers, const std::vector<std::string> & more,
                                          const std::string & model) {
        std::vector<std::string> all = {"--engine",   "test",           "--model",           model,
                                        "--layers",   layers,           "--artifact-digest", "sha256:test",
                                        "--shard-id", "shard-" + layers};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }

    Process process_;
    HopAddress address_;
};

using Shards = std::vector<std::unique_ptr<ShardProcess>>;

Shards start(const std::vector<std::string> & layers, const std::vector<std::string> & more = {},
             const std::string & model = "test:6") {
    Shards shards;
    for (const auto & range : layers) {
        shards.push_back(std::make_unique<ShardProcess>(range, more, model));
    }
    return shards;
}

std::vector<HopAddress> addresses(const Shards & shards) {
    std::vector<HopAddress> result;
    for (const auto & shard : shards) {
        result.push_back(shard->address());
    }
    return result;
}

TEST(ShardProcess, RoutesAnswerLikeAPlainLoop) {
    for (const std::vector<std::string> & layers :
         std::vector<std::vector<std::string>>{{"all"}, {"0:3", "3:6"}, {"0:1", "1:4", "4:6"}}) {
        auto shards = start(layers);
        TestSession session(addresses(shards));
        session.open();
        auto request = session.generate_request(prompt, 100);
        request.set_ignore_eog(true);
        EXPECT_EQ(session.client(0).generate(request).ids(), direct_tokens("test:6", prompt, 100, {}, true));
        session.close();
        for (auto & shard : shards) {
            shard->process().signal(SIGTERM);
            EXPECT_EQ(shard->process().wait(), 0);
        }
    }
}

TEST(ShardProcess, BadFlagsExitWith2) {
    Process process({"--layers", "5:2"});
    EXPECT_EQ(process.read_line(), "");
    EXPECT_EQ(process.wait(), 2);
    setenv("MESHNET_WORKER_KEY", "not hex", 1);
    Process bad_key({"--engine", "test", "--model", "test"});
    unsetenv("MESHNET_WORKER_KEY");
    EXPECT_EQ(bad_key.wait(), 2);
}

TEST(ShardProcess, ARangeThatCannotBeLoadedExitsWith3) {
    Process process({"--engine", "test", "--model", "test:6", "--layers", "3:7"});
    const std::string line = process.read_line();
    EXPECT_EQ(field(line, "event"), "failed");
    EXPECT_EQ(field(line, "code"), "illegal_cut");
    EXPECT_NE(field(line, "message").find("3:7"), std::string::npos);
    EXPECT_EQ(process.wait(), 3);
}

TEST(ShardProcess, AnAddressInUseExitsWith3) {
    auto shards = start({"all"});
    Process process({"--engine", "test", "--model", "test", "--listen", shards[0]->address().address});
    EXPECT_EQ(field(process.read_line(), "code"), "listen");
    EXPECT_EQ(process.wait(), 3);
}

TEST(ShardProcess, DescribesItselfWithoutServing) {
    Process process({"--engine", "test", "--model", "test:9:0:2", "--layers", "2:5", "--describe"});
    v1::DescribeResponse description;
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(process.read_line(), &description).ok());
    EXPECT_EQ(description.n_layer(), 9U);
    EXPECT_EQ(description.boundary_in().tensors_size(), 2);
    EXPECT_EQ(process.wait(), 0);
}

TEST(ShardProcess, ChecksTicketsWithTheKeyOfItsEnvironment) {
    setenv("MESHNET_WORKER_KEY", "00ff", 1);
    auto shards = start({"all"});
    unsetenv("MESHNET_WORKER_KEY");
    TestSession session(addresses(shards));
    v1::OpenResponse response;
    v1::RefusalDetail refusal;
    EXPECT_FALSE(session.client(0).open(session.open_request(0), response, refusal).ok());
    EXPECT_EQ(refusal.refusal(), v1::REFUSAL_BAD_TICKET);
}

TEST(ShardProcess, ExitsWithItsParent) {
    ShardProcess orphan("all", {"--exit-with-parent"});
    orphan.process().close_stdin();
    EXPECT_EQ(orphan.process().wait(), 0);
    ShardProcess independent("all");
    independent.process().close_stdin();
    EXPECT_EQ(independent.address().description.n_layer(),
              HopClient(independent.address().address).describe().n_layer());
    independent.process().signal(SIGTERM);
    EXPECT_EQ(independent.process().wait(), 0);
}

// A generation in mid-stream: `on_token` runs after the third token.
Outcome interrupted(TestSession & session, const std::function<void()> & on_token) {
    auto request = session.generate_request(prompt, 3000);
    request.set_ignore_eog(true);
    int seen = 0;
    return session.client(0).generate(request, [&](const v1::GenerateEvent & event) {
        if (event.has_token() && ++seen == 3) {
            on_token();
        }
    });
}

TEST(ShardProcess, DrainsOnSigterm) {
    auto shards = start({"0:3", "3:6"}, {"--context", "4000"}, "test:6:10");
    TestSession session(addresses(shards));
    session.token_capacity = 4000;
    session.open();
    const auto outcome = interrupted(session, [&] {
        shards[0]->process().signal(SIGTERM);
        TestSession late(addresses(shards));
        v1::OpenResponse response;
        v1::RefusalDetail refusal;
        EXPECT_TRUE(eventually([&] {
            TestSession probe(addresses(shards));
            return !probe.client(0).open(probe.open_request(0), response, refusal).ok();
        }));
        EXPECT_EQ(refusal.refusal(), v1::REFUSAL_DRAINING);
    });
    ASSERT_TRUE(outcome.finished.has_value()) << "the running session ends in its own time";
    EXPECT_EQ(outcome.tokens.size(), 3000U);
    session.close();
    shards[0]->process().signal(SIGTERM);  // sessions that the probe opened before the drain are still there
    EXPECT_EQ(shards[0]->process().wait(), 0);
}

TEST(ShardProcess, ASecondSigtermExitsAtOnce) {
    auto shards = start({"all"});
    TestSession session(addresses(shards));
    session.open();
    shards[0]->process().signal(SIGTERM);
    ASSERT_TRUE(eventually([&] { return session.client(0).status().draining(); }));
    shards[0]->process().signal(SIGTERM);
    EXPECT_EQ(shards[0]->process().wait(), 0);
}

TEST(ShardProcess, TheDrainEndsAtItsTimeout) {
    auto shards = start({"all"}, {"--drain-timeout-s", "1"});
    TestSession session(addresses(shards));
    session.open();
    shards[0]->process().signal(SIGTERM);
    EXPECT_EQ(shards[0]->process().wait(), 0);
}

// Breaks hop `victim` of three in mid-stream; the head must name it within `limit_ms`.
void expect_named(uint32_t victim, int signal, int64_t limit_ms) {
    auto shards = start({"0:2", "2:4", "4:6"}, {"--context", "4000"}, "test:6:50");
    TestSession session(addresses(shards));
    session.token_capacity = 4000;
    session.open();
    std::chrono::steady_clock::time_point broken;
    const auto outcome = interrupted(session, [&] {
        shards[victim]->process().signal(signal);
        broken = std::chrono::steady_clock::now();
    });
    const auto took = std::chrono::steady_clock::now() - broken;
    ASSERT_TRUE(outcome.failed.has_value());
    EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_PEER_LOST);
    EXPECT_EQ(outcome.failed->hop_index(), victim) << outcome.failed->message();
    EXPECT_LT(std::chrono::duration_cast<std::chrono::milliseconds>(took).count(), limit_ms);
    // The head serves on: the same session, on a repaired route with a new third hop.
    if (victim == 2) {
        shards[2] = std::make_unique<ShardProcess>("4:6", std::vector<std::string>{"--context", "4000"}, "test:6:50");
        TestSession repaired(addresses(shards), session.id());
        repaired.epoch = 2;
        repaired.token_capacity = 4000;
        const auto opened = repaired.open();
        EXPECT_GT(opened[0].cached_tokens(), 0U);
        EXPECT_EQ(opened[2].cached_tokens(), 0U);
        EXPECT_EQ(repaired.generate(prompt, 20).ids(), direct_tokens("test:6", prompt, 20));
    }
}

TEST(ShardProcess, AKilledTailIsNamedWithinASecond) {
    expect_named(2, SIGKILL, 1000);
}

TEST(ShardProcess, AKilledMiddleIsNamedWithinASecond) {
    expect_named(1, SIGKILL, 1000);
}

TEST(ShardProcess, AHungTailIsNamedByTheKeepalive) {
    expect_named(2, SIGSTOP, 6000);
}

TEST(ShardProcess, AHungMiddleIsNamedByTheKeepalive) {
    expect_named(1, SIGSTOP, 6000);
}

TEST(ShardProcess, AHopThatHangsBetweenFramesIsNamedToo) {
    for (const uint32_t victim : {1U, 2U}) {
        auto shards = start({"0:2", "2:4", "4:6"});
        TestSession session(addresses(shards));
        session.open();
        ASSERT_TRUE(session.generate(prompt, 5).finished.has_value());
        shards[victim]->process().signal(SIGSTOP);
        const auto stopped = std::chrono::steady_clock::now();
        const auto outcome = session.generate(prompt, 5);
        const auto took = std::chrono::steady_clock::now() - stopped;
        ASSERT_TRUE(outcome.failed.has_value());
        EXPECT_EQ(outcome.failed->refusal(), v1::REFUSAL_PEER_LOST);
        EXPECT_EQ(outcome.failed->hop_index(), victim) << outcome.failed->message();
        EXPECT_LT(std::chrono::duration_cast<std::chrono::milliseconds>(took).count(), 6000);
    }
}

// The others notice by themselves: their sessions break, and end when no gateway repairs them.
TEST(ShardProcess, AHungHeadIsNoticedByAllHops) {
    for (const bool in_a_generation : {false, true}) {
        auto shards = start({"0:2", "2:4", "4:6"}, {"--orphan-timeout-ms", "500", "--context", "4000"}, "test:6:50");
        TestSession session(addresses(shards));
        session.token_capacity = 4000;
        session.open();
        if (in_a_generation) {
            grpc::ClientContext context;
            auto request = session.generate_request(prompt, 3000);
            request.set_ignore_eog(true);
            session.client(0).generate(
                request,
                [&](const v1::GenerateEvent & event) {
                    if (event.has_token()) {
                        shards[0]->process().signal(SIGSTOP);
                        context.TryCancel();
                    }
                },
                &context);
        } else {
            ASSERT_TRUE(session.generate(prompt, 5).finished.has_value());
            shards[0]->process().signal(SIGSTOP);
        }
        const auto stopped = std::chrono::steady_clock::now();
        EXPECT_TRUE(eventually([&] {
            return session.client(1).status().open_sessions() + session.client(2).status().open_sessions() == 0;
        }));
        const auto took = std::chrono::steady_clock::now() - stopped;
        EXPECT_LT(std::chrono::duration_cast<std::chrono::milliseconds>(took).count(), 7000);
    }
}

TEST(ShardProcess, ARouteWithoutAGatewayIsFreed) {
    auto shards = start({"0:2", "2:4", "4:6"}, {"--orphan-timeout-ms", "300"});
    TestSession session(addresses(shards));
    session.open();
    ASSERT_TRUE(session.generate(prompt, 5).finished.has_value());
    EXPECT_TRUE(eventually([&] {
        uint32_t open = 0;
        for (size_t hop = 0; hop < shards.size(); ++hop) {
            open += session.client(hop).status().open_sessions();
        }
        return open == 0;
    }));
}

TEST(ShardProcess, AnotherSessionDoesNotNoticeADeadHop) {
    auto shards = start({"0:3", "3:6"}, {"--context", "4000"}, "test:6:20");
    auto spare = std::make_unique<ShardProcess>("3:6", std::vector<std::string>{"--context", "4000"}, "test:6:20");
    TestSession doomed(addresses(shards));
    TestSession healthy({shards[0]->address(), spare->address()});
    doomed.token_capacity = healthy.token_capacity = 4000;
    doomed.open();
    healthy.open();
    Outcome good;
    auto request = healthy.generate_request(prompt, 1000);
    request.set_ignore_eog(true);
    std::thread other([&] { good = healthy.client(0).generate(request); });
    const auto bad = interrupted(doomed, [&] { shards[1]->process().signal(SIGKILL); });
    other.join();
    EXPECT_TRUE(bad.failed.has_value());
    EXPECT_EQ(good.ids(), direct_tokens("test:6", prompt, 1000, {}, true));
}

}  // namespace
}  // namespace meshnet::test
