# Compiler settings shared by every target, and helpers to add tests.

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

# Warnings, feature macros and sanitizers of our own code; generated code links it too but silences warnings itself.
add_library(mok_flags INTERFACE)
target_compile_definitions(mok_flags INTERFACE _GNU_SOURCE MOK_BUILD_VERSION="${PROJECT_VERSION}")
target_compile_options(mok_flags INTERFACE
    -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wformat=2 -Wundef -Wimplicit-fallthrough
    -Wpointer-arith -Wwrite-strings -Wcast-align -Wold-style-definition -Wnull-dereference -Wdouble-promotion
    -fno-strict-aliasing -fno-common)
if(MOK_WERROR)
    target_compile_options(mok_flags INTERFACE -Werror)
endif()
if(MOK_SANITIZE)
    string(REPLACE ";" "," _san "${MOK_SANITIZE}")
    target_compile_options(mok_flags INTERFACE -fsanitize=${_san} -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(mok_flags INTERFACE -fsanitize=${_san})
    target_compile_definitions(mok_flags INTERFACE MOK_SANITIZED=1)
endif()

# mok_add_test(NAME name LABEL unit|integration|chaos|gpu [TIMEOUT seconds] SOURCES ... LIBRARIES ...)
# A cmocka program; each runs in a process of its own with a time-out. Exit code 77: skipped.
function(mok_add_test)
    cmake_parse_arguments(T "" "NAME;LABEL;TIMEOUT" "SOURCES;LIBRARIES" ${ARGN})
    if(NOT T_TIMEOUT)
        set(T_TIMEOUT 60)
    endif()
    add_executable(${T_NAME} ${T_SOURCES})
    target_link_libraries(${T_NAME} PRIVATE mok_flags PkgConfig::CMOCKA ${T_LIBRARIES})
    add_test(NAME ${T_NAME} COMMAND ${T_NAME})
    mok_test_environment(${T_NAME} ${T_LABEL} ${T_TIMEOUT})
endfunction()

# mok_add_script_test(NAME name LABEL label [TIMEOUT seconds] COMMAND ...)
function(mok_add_script_test)
    cmake_parse_arguments(T "" "NAME;LABEL;TIMEOUT" "COMMAND" ${ARGN})
    if(NOT T_TIMEOUT)
        set(T_TIMEOUT 120)
    endif()
    add_test(NAME ${T_NAME} COMMAND ${T_COMMAND})
    mok_test_environment(${T_NAME} ${T_LABEL} ${T_TIMEOUT})
endfunction()

# ctest counts halves of a core (-j4: two cores): a test takes a whole one, those that mostly wait half of one.
function(mok_tests_wait)
    set_tests_properties(${ARGN} PROPERTIES PROCESSORS 1)
endfunction()

function(mok_test_environment name label timeout)
    if(MOK_SANITIZE) # five to twenty times slower than without
        math(EXPR timeout "${timeout} * 6")
    endif()
    set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${timeout} SKIP_RETURN_CODE 77 PROCESSORS 2
        ENVIRONMENT "MOK_BUILD_DIR=${CMAKE_BINARY_DIR};MOK_SOURCE_DIR=${CMAKE_SOURCE_DIR};OPENBLAS_NUM_THREADS=1")
    if(label MATCHES "^(chaos|gpu)$") # they measure, or there is one of what they need
        set_tests_properties(${name} PROPERTIES RESOURCE_LOCK alone)
    endif()
endfunction()
