// The machine as a program: runs the launches that a text describes, on memory that it shares with
// whoever wrote it. Ends with 0, with 1 and a message, or with 66 and one of a race.
//
//     arena FILE ADDRESS BYTES
//     schedule SEED LANDING DISTURBED
//     launch VARIANT GRID BLOCK SHARED_BYTES OVERLAP MAX_RESIDENT PARAMS
//
// Numbers are decimal, params hexadecimal.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include "machine.h"

namespace {

[[noreturn]] void stop(const std::string& message) {
    fprintf(stderr, "%s\n", message.c_str());
    fflush(stderr);
    // Nothing is torn down: a stopped machine is not whole.
    _exit(1);
}

void map_arena(std::istringstream& line) {
    std::string file;
    uint64_t address = 0;
    uint64_t bytes = 0;
    line >> file >> address >> bytes;
    const int descriptor = open(file.c_str(), O_RDWR);
    void* wanted = reinterpret_cast<void*>(address);
    const int flags = MAP_SHARED | MAP_FIXED_NOREPLACE;
    const int protection = PROT_READ | PROT_WRITE;
    if (descriptor < 0 || mmap(wanted, bytes, protection, flags, descriptor, 0) != wanted) {
        stop("the arena " + file + " cannot be mapped at " + std::to_string(address));
    }
    close(descriptor);
}

std::vector<uint8_t> bytes_of(const std::string& text) {
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i + 1 < text.size(); i += 2) {
        bytes.push_back(static_cast<uint8_t>(std::stoul(text.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

emu::Launch read_launch(std::istringstream& line) {
    emu::Launch launch;
    std::string variant;
    std::string params;
    line >> variant >> launch.grid >> launch.block >> launch.shared_bytes >> launch.overlap >>
        launch.max_resident >> params;
    launch.entry = emu::find_entry(variant);
    if (!launch.entry) {
        stop("no kernel is called " + variant);
    }
    launch.params = bytes_of(params);
    return launch;
}

}  // namespace

int main(int, char** arguments) {
    std::ifstream job(arguments[1]);
    std::vector<emu::Launch> launches;
    emu::Schedule schedule;
    std::string text;
    while (std::getline(job, text)) {
        std::istringstream line(text);
        std::string word;
        line >> word;
        if (word == "arena") {
            map_arena(line);
        } else if (word == "schedule") {
            int landing = 0;
            line >> schedule.seed >> landing >> schedule.disturbed;
            schedule.landing = static_cast<emu::Landing>(landing);
        } else {
            launches.push_back(read_launch(line));
        }
    }
    const std::string failure = emu::run(launches, schedule);
    if (!failure.empty()) {
        stop(failure);
    }
    return 0;
}
