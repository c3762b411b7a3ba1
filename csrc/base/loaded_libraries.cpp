#include "base/loaded_libraries.h"

#include <algorithm>
#include <cstring>

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

namespace trainstream {

namespace {

struct Search {
    const std::vector<std::string>* names;
    std::vector<std::string> found;
};

bool begins_with_any(const char* text, const std::vector<std::string>& names) {
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
        return std::strncmp(text, name.c_str(), name.size()) == 0;
    });
}

const ElfW(Dyn) * dynamic_section(const dl_phdr_info& info) {
    for (int i = 0; i < info.dlpi_phnum; ++i) {
        if (info.dlpi_phdr[i].p_type == PT_DYNAMIC) {
            return reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
        }
    }
    return nullptr;
}

/// The loader makes the address absolute, except on some architectures and for the kernel's own.
const char* strings_of(const dl_phdr_info& info, const ElfW(Dyn) * section) {
    for (const auto* entry = section; entry->d_tag != DT_NULL; ++entry) {
        if (entry->d_tag == DT_STRTAB) {
            const ElfW(Addr) address = entry->d_un.d_ptr;
            const bool is_relative = address < info.dlpi_addr;
            return reinterpret_cast<const char*>(address + (is_relative ? info.dlpi_addr : 0));
        }
    }
    return nullptr;
}

int look_at(dl_phdr_info* info, size_t /*size*/, void* context) {
    auto* search = static_cast<Search*>(context);
    const ElfW(Dyn)* section = dynamic_section(*info);
    const char* strings = section == nullptr ? nullptr : strings_of(*info, section);
    if (strings == nullptr || info->dlpi_name == nullptr || info->dlpi_name[0] == '\0') {
        return 0;
    }
    for (const auto* entry = section; entry->d_tag != DT_NULL; ++entry) {
        if (entry->d_tag == DT_NEEDED &&
            begins_with_any(strings + entry->d_un.d_val, *search->names)) {
            search->found.emplace_back(info->dlpi_name);
            break;
        }
    }
    return 0;
}

int note_count(dl_phdr_info* info, size_t /*size*/, void* context) {
    *static_cast<uint64_t*>(context) = info->dlpi_adds;
    return 1;  // It is the same for all.
}

}  // namespace

uint64_t libraries_loaded() {
    uint64_t count = 0;
    dl_iterate_phdr(&note_count, &count);
    return count;
}

std::vector<std::string> libraries_that_need(const std::vector<std::string>& names) {
    Search search{&names, {}};
    dl_iterate_phdr(&look_at, &search);
    return search.found;
}

std::string library_of(const void* address) {
    Dl_info info;
    return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

}  // namespace trainstream
